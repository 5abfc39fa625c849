"""Checks of a finished adapter: the file holds what was trained, and merging changes nothing.

Knows: trained modules, the written adapter, one probe pack. Does not know: recipes, the loop.

Shape letters: R probe rows, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.adapter import load_adapter
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.expert_lora import ExpertAdapter
from trimtab.models.experts import DenseWeight
from trimtab.models.full import full_modules, put_back
from trimtab.models.linear import Linear
from trimtab.models.lora import Adapter, LoRA, add_delta, disabled, lora_modules
from trimtab.models.packed import PackedWeight
from trimtab.models.tape import ChoiceTape
from trimtab.train.batch import MicroBatch, on_device
from trimtab.verdict import Verdict

_PROBE_ROWS = 256
MERGE_LIMIT: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
}
"""Largest logit difference over the largest logit, by compute dtype, routing held fixed."""


def check_adapter_file(
    path: Path, arch: ArchSpec, parameters: Mapping[str, Parameter]
) -> Verdict:
    """Read the adapter back and compare every tensor bit for bit."""
    stored = load_adapter(path, arch).tensors
    wrong = sorted(stored.keys() ^ parameters.keys()) + [
        name for name in sorted(stored.keys() & parameters.keys())
        if not torch.equal(stored[name], parameters[name].detach().cpu())
    ]
    where = wrong[0] if wrong else path.name
    return Verdict.at_most("adapter tensors that differ after reading back", len(wrong), 0, where)


@torch.no_grad()
def check_merge(model: CausalLM, batch: MicroBatch) -> tuple[Verdict, ...]:
    """Logits of the merged weights against base + adapter on one probe, routing held fixed.

    The first verdict merges in float32 (in float64 where the base is) and tests the arithmetic;
    the second reports, without a limit, what rounding the merged weights to the stored dtype
    costs in units of the adapter's own effect.
    """
    tape = ChoiceTape()
    adapted = _logits(model, batch, tape)
    forced = tape.choices
    with disabled(model):
        base = _logits(model, batch, ChoiceTape("force", forced))
    with _merged(model, rounded=False):
        exact = _logits(model, batch, ChoiceTape("force", forced))
    with _merged(model, rounded=True):
        rounded = _logits(model, batch, ChoiceTape("force", forced))
    relative = float((exact - adapted).abs().max() / adapted.abs().max())
    effect = float((adapted - base).norm())
    noise = float((rounded - adapted).norm()) / effect if effect > 0 else 0.0
    limit = MERGE_LIMIT[model.compute_dtype]
    return (
        Verdict.at_most("merged against adapter, largest relative logit difference", relative,
                        limit),
        Verdict("rounding of merged weights, share of the adapter's effect", noise, None, True),
    )


def _logits(model: CausalLM, batch: MicroBatch, tape: ChoiceTape) -> Tensor:
    """[R, W] of the first real tokens, at least float32."""
    device = model.embed.weight.device
    valid = batch.valid.to(device)
    images = on_device(batch.images, device)
    context = ForwardContext.packed(batch.lengths, device, valid=valid, tape=tape, images=images)
    hidden = model(batch.input_ids.to(device), context)
    logits = model.logits(hidden[valid][:_PROBE_ROWS])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def _merged(model: CausalLM, *, rounded: bool) -> Iterator[None]:
    """Adapted modules carry merged weights and no adapter inside the block; packed ones keep it."""
    kept: list[tuple[Linear | DenseWeight, Parameter, Adapter]] = []
    trained = []  # what a merge of parameters trained in full is but for rounding
    for _, full, frozen in full_modules(model) if rounded else ():
        stored = {leaf: _rounded(full.get_parameter(leaf), p.dtype) for leaf, p in frozen.items()}
        trained.append((full, put_back(full, stored)))
    for name, lora in lora_modules(model).items():
        module = model.get_submodule(name)
        if isinstance(module, PackedWeight):  # nothing to merge into without packing anew
            continue
        assert isinstance(module, Linear | DenseWeight), f"{name} cannot take an adapter"
        kept.append((module, module.weight, lora))
    try:
        for module, weight, child in kept:
            wide = torch.promote_types(weight.dtype, torch.float32)
            merged = weight.detach().to(weight.dtype if rounded else wide, copy=True)
            add_delta(merged, weight.detach(), child)
            module.weight = Parameter(merged, requires_grad=False)
            module.lora = None
        yield
    finally:
        for full, masters in trained:
            put_back(full, masters)
        for module, weight, child in kept:
            module.weight = weight
            if isinstance(module, Linear):
                assert not isinstance(child, ExpertAdapter)
                module.lora = child
            else:
                assert not isinstance(child, LoRA)
                module.lora = child


def _rounded(parameter: Parameter, dtype: torch.dtype) -> Parameter:
    return Parameter(parameter.detach().to(dtype), requires_grad=False)
