"""The numbers of a model that is only planned, in the form that `inspect` shows.

Knows: sums over an outline. Does not know: how its tensors lie in files, printing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from trimtab.arch.outline import GatedDeltaSpec, GQASpec, Outline, OutlineLayer
from trimtab.arch.outline_cache import active_parameters, request_bytes
from trimtab.arch.spec import DenseSpec, MoESpec
from trimtab.arch.summary import LayerSummary, OwnerSummary, Summary
from trimtab.units import format_bytes

PLANNED_ONLY = "the family is only planned: `trimtab plan` takes it, no other verb reads its weights"


def summarise_outline(outline: Outline) -> Summary:
    """Sum the parameters of a planned family; how many tensors the files have is not known."""
    elements: Counter[str] = Counter()
    owner_bytes: Counter[str] = Counter()
    form_bytes: Counter[str] = Counter()
    for param in outline.params:
        size = outline.stored_bytes[param.name]
        elements[param.owner] += param.numel
        owner_bytes[param.owner] += size
        form_bytes[_form(size / param.numel)] += size
    request = request_bytes(outline, 1)
    total = elements.total()
    packed = next((form for form in ("MXFP4", "FP8") if form in form_bytes), None)
    return Summary(
        model_type=outline.family, name=outline.name, total_parameters=total,
        active_parameters_per_token=round(active_parameters(outline)), num_tensors=None,
        stored_bytes=form_bytes.total(), bf16_bytes=2 * total,
        kv_bytes_per_token=round(request.per_token), state_bytes_per_sequence=round(request.state),
        conv_bytes_per_sequence=round(request.tail), bytes_by_dtype=dict(form_bytes.most_common()),
        quantization=packed,
        owners=tuple(OwnerSummary(o, elements[o], owner_bytes[o]) for o in elements),
        layers=tuple(_layer(index, layer) for index, layer in enumerate(outline.layers)),
        mtp=None, unusual=tuple(_unusual(outline, request.window)), unsupported=(PLANNED_ONLY,),
        ignored=(),
    )


def _form(bytes_per_element: float) -> str:
    if bytes_per_element == 2:
        return "BF16"
    return "MXFP4" if bytes_per_element < 1 else "FP8"


def _layer(index: int, layer: OutlineLayer) -> LayerSummary:
    mixer: Literal["gqa", "gdn", "mla"] = "mla"
    if isinstance(layer.mixer, GQASpec):
        mixer = "gqa"
    elif isinstance(layer.mixer, GatedDeltaSpec):
        mixer = "gdn"
    return LayerSummary(index, mixer, None, "dense" if isinstance(layer.ffn, DenseSpec) else "moe")


def _unusual(outline: Outline, window: float) -> Iterator[str]:
    """What a layer of this kind need not have, in the order a token meets it."""
    mixers = [layer.mixer for layer in outline.layers]
    windows = [m.window for m in mixers if isinstance(m, GQASpec) and m.window is not None]
    if windows:
        yield (f"sliding windows of {windows[0]} keys in {len(windows)} layers, which keep "
               f"{format_bytes(window)} per sequence at most")
    if any(isinstance(m, GQASpec) and m.sinks for m in mixers):
        yield "a learned logit per head joins the softmax"
    delta = [m for m in mixers if isinstance(m, GatedDeltaSpec)]
    if delta:
        yield (f"gated DeltaNet in {len(delta)} layers: {delta[0].value_heads} heads, states of "
               f"{delta[0].key_dim} x {delta[0].value_dim}")
    moes = [layer.ffn for layer in outline.layers if isinstance(layer.ffn, MoESpec)]
    if moes:
        yield f"{moes[0].top_k} of {moes[0].num_experts} experts per token in {len(moes)} layers"
