"""One step: the gradient is that of the whole batch, however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.unit.train.tiny_run import recipe_for
from trimtab.arch.adapter import resolve_targets
from trimtab.checkpoint.load import load_model
from trimtab.data.packing import Pack
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import RunError
from trimtab.models.context import ForwardContext, Recompute
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import inject, lora_parameters
from trimtab.train.plan import BatchPlan
from trimtab.train.step import OnNaN, StepOptions, StepResult, clip_gradients, train_step


def packs(directory: Path, checkpoint: Path, count: int) -> list[Pack]:
    recipe = recipe_for(directory, checkpoint)
    stream = DataStream(recipe.finetune.data, load_tokenizer(checkpoint), 17)
    return [stream.next_pack() for _ in range(count)]


def adapted(checkpoint: Path, *, dropout: float = 0.1, nonzero: bool = True) -> CausalLM:
    model, arch = load_model(checkpoint, base_dtype="fp64")
    targets = resolve_targets(arch, target_modules=["attention", "dense_ffn", "latent"], rank=4,
                              alpha=8, dropout=dropout)  # fmt: skip
    inject(model, targets, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora_parameters(model).items():
            if nonzero and name.endswith("B"):
                parameter.normal_(0, 0.05, generator=generator)
    return model


def step(
    model: CausalLM, batch: list[Pack], micro: int, *, recompute: Recompute = "none",
    on_nan: OnNaN = "error",
) -> tuple[StepResult, dict[str, Tensor]]:
    named = lora_parameters(model)
    options = StepOptions(BatchPlan(64 * len(batch), micro, 64), 17, None, on_nan, recompute)
    optimizer = torch.optim.SGD(named.values(), lr=0.0)
    result = train_step(model, batch, list(named.values()), optimizer, step=0, options=options)
    return result, {n: p.grad.clone() for n, p in named.items() if p.grad is not None}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], limit: float) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        assert float((a[name] - b[name]).norm()) <= limit * float(a[name].norm()), name


def test_the_gradient_does_not_depend_on_the_accumulation(tmp_path: Path, checkpoint: Path) -> None:
    model = adapted(checkpoint)
    batch = packs(tmp_path, checkpoint, 4)
    counts = {p.num_supervised for p in batch}
    whole, gradient = step(model, batch, 256)
    parts, cut = step(model, batch, 64)
    assert len(counts) > 1, "uneven micro-batches are the point"
    assert whole.supervised_tokens == parts.supervised_tokens
    assert whole.loss == pytest.approx(parts.loss, rel=1e-9)
    assert_close(gradient, cut, 1e-6)  # gradients are float32, the computation float64


def test_recomputation_changes_nothing(tmp_path: Path, checkpoint: Path) -> None:
    model = adapted(checkpoint)
    batch = packs(tmp_path, checkpoint, 2)
    kept, gradient = step(model, batch, 128)
    for recompute in ("layer", "selective"):
        again, recomputed = step(model, batch, 128, recompute=recompute)
        assert kept.loss == again.loss
        assert_close(gradient, recomputed, 1e-6)


def test_selective_recomputation_gives_the_bits_of_recomputing_everything(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = adapted(checkpoint)
    batch = packs(tmp_path, checkpoint, 2)
    (whole, every), (kept, some) = (
        step(model, batch, 128, recompute=recompute) for recompute in ("layer", "selective")
    )
    assert whole.loss == kept.loss and every.keys() == some.keys()
    assert all(torch.equal(every[name], some[name]) for name in every)


def test_a_zero_b_gives_the_base_logits_bit_for_bit(checkpoint: Path) -> None:
    ids = torch.arange(40) % 250
    context = ForwardContext.packed([25, 15])
    base, _ = load_model(checkpoint, base_dtype="fp64")
    model = adapted(checkpoint, nonzero=False)
    with torch.no_grad():
        assert torch.equal(model.logits(model(ids, context)), base.logits(base(ids, context)))


def test_a_loss_that_is_no_number_stops_the_run_or_skips_the_step(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = adapted(checkpoint)
    first = next(iter(lora_parameters(model).values()))
    with torch.no_grad():
        first.fill_(torch.nan)
    batch = packs(tmp_path, checkpoint, 1)
    with pytest.raises(RunError, match=r"TT602.*step 1"):
        step(model, batch, 64)
    assert step(model, batch, 64, on_nan="skip")[0].skipped


def test_steps_on_one_batch_lower_its_loss(tmp_path: Path, checkpoint: Path) -> None:
    model = adapted(checkpoint, dropout=0.0, nonzero=False)
    batch = packs(tmp_path, checkpoint, 1)
    named = lora_parameters(model)
    options = StepOptions(BatchPlan(64, 64, 64), 17, 1.0, "error", "none")
    optimizer = torch.optim.AdamW(named.values(), lr=3e-2)
    losses = [
        train_step(model, batch, list(named.values()), optimizer, step=i, options=options).loss
        for i in range(12)
    ]
    assert losses[-1] < losses[0] - 0.3


def test_clipping_scales_all_gradients_to_the_limit() -> None:
    a, b = Parameter(torch.zeros(2)), Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients([a, b], 1.0) == 5.0
    assert torch.allclose(a.grad, torch.tensor([0.6, 0.0])) and b.grad.item() == pytest.approx(0.8)
    assert clip_gradients([a, b], 10.0) == pytest.approx(1.0)
    assert b.grad.item() == pytest.approx(0.8)
