"""Summary: the numbers of a model that follow from its architecture alone.

Knows: sums over the inventory, its stored form and its caches. Does not know: files, printing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from trimtab.arch.cache import cache_specs
from trimtab.arch.maps import census
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import (
    ArchSpec,
    AttnRes,
    DenseSpec,
    HyperConnections,
    KDASpec,
    LayerSpec,
    MLASpec,
    MoESpec,
)
from trimtab.arch.stored import StoredTensor
from trimtab.units import format_bytes, format_count

_IMAGE_OWNERS = {"vision", "projector"}
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One layer as `inspect` shows it."""

    index: int
    mixer: Literal["kda", "mla", "gqa", "gdn"]
    indexer: Literal["full", "shared"] | None
    ffn: Literal["dense", "moe"]


@dataclass(frozen=True, slots=True)
class OwnerSummary:
    """The share of one kind of module: stored elements and bytes in the files."""

    owner: str
    parameters: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class SkippedSummary:
    """Multi-token prediction layers that the released files have beside the model."""

    layers: tuple[int, ...]
    parameters: int
    num_tensors: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What `trimtab inspect --json` prints of an architecture.

    Args:
        model_type: the family.
        name: what users call the model.
        total_parameters: elements of all stored tensors, padding included, scales not.
        active_parameters_per_token: text parameters without unselected experts and without the
            input table, the head counted once.
        num_tensors: tensors in the released files, None where a family is only planned.
        stored_bytes: their bytes, file headers not counted.
        bf16_bytes: bytes with every parameter in bfloat16.
        kv_bytes_per_token: cache that grows with the sequence, bf16, indexer keys included.
        state_bytes_per_sequence: fp32 recurrent state, without the convolution tail.
        conv_bytes_per_sequence: the convolution tail, bf16.
        bytes_by_dtype: stored bytes per form: BF16, F32, and MXFP4, FP8, NVFP4 with their scales.
        quantization: stored form of most matrices as users know it, None where they are plain.
        owners: the same bytes per kind of module, in forward order.
        layers: one entry per decoder layer.
        mtp: what is recognised and skipped, in none of the other numbers.
        unusual: features that few models have, in words.
        unsupported: features that no verb supports yet.
        ignored: config keys that were read and have no effect.
    """

    model_type: str
    name: str
    total_parameters: int
    active_parameters_per_token: int
    num_tensors: int | None
    stored_bytes: int
    bf16_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    conv_bytes_per_sequence: int
    bytes_by_dtype: dict[str, int]
    quantization: str | None
    owners: tuple[OwnerSummary, ...]
    layers: tuple[LayerSummary, ...]
    mtp: SkippedSummary | None
    unusual: tuple[str, ...]
    unsupported: tuple[str, ...]
    ignored: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def summarise(arch: ArchSpec) -> Summary:
    """Sum the inventory of a model.

    >>> from trimtab.arch.load import load_arch
    >>> from trimtab.arch.presets import preset_config
    >>> summary = summarise(load_arch(preset_config("kimi-k3")))
    >>> summary.total_parameters, summary.num_tensors, summary.stored_bytes
    (2779931837184, 497220, 1560860324864)
    """
    num_tensors = 0
    elements: Counter[str] = Counter()
    owner_bytes: Counter[str] = Counter()
    dtype_bytes: Counter[str] = Counter()
    for param, tensor, count in census(arch):
        num_tensors += count
        elements[param.owner] += _elements(param, tensor) * count
        owner_bytes[param.owner] += tensor.num_bytes * count
        dtype_bytes[_form_name(arch, tensor)] += tensor.num_bytes * count
    mtp = _skipped(arch)
    total = elements.total()
    caches = cache_specs(arch)
    return Summary(
        model_type=arch.family,
        name=arch.name,
        total_parameters=total,
        active_parameters_per_token=active_parameters(arch, elements),
        num_tensors=num_tensors,
        stored_bytes=dtype_bytes.total(),
        bf16_bytes=total * _BF16_BYTES,
        kv_bytes_per_token=sum(cache.bytes_per_token for cache in caches),
        state_bytes_per_sequence=sum(cache.state_bytes for cache in caches),
        conv_bytes_per_sequence=sum(cache.conv_bytes for cache in caches),
        bytes_by_dtype=dict(dtype_bytes.most_common()),
        quantization=_quantization_name(arch),
        owners=tuple(OwnerSummary(o, elements[o], owner_bytes[o]) for o in elements),
        layers=tuple(_layer(index, layer) for index, layer in enumerate(arch.layers)),
        mtp=mtp,
        unusual=describe_unusual(arch),
        unsupported=arch.unsupported + _unsupported(arch, mtp),
        ignored=arch.ignored,
    )


def _skipped(arch: ArchSpec) -> SkippedSummary | None:
    if not arch.mtp:
        return None
    parameters = tensors = size = 0
    for param, tensor, count in census(arch, mtp=True):
        parameters += _elements(param, tensor) * count
        tensors += count
        size += tensor.num_bytes * count
    first = arch.num_layers
    return SkippedSummary(tuple(range(first, first + len(arch.mtp))), parameters, tensors, size)


def _unsupported(arch: ArchSpec, mtp: SkippedSummary | None) -> tuple[str, ...]:
    lines = []
    if mtp is not None:
        word = "layer" if len(mtp.layers) == 1 else "layers"
        lines.append(
            f"multi-token prediction: {word} {', '.join(map(str, mtp.layers))} "
            f"({format_count(mtp.parameters)} parameters, {format_bytes(mtp.stored_bytes)}), "
            "recognised and skipped"
        )
    if arch.quantization is not None and not arch.quantization.readable:
        name = arch.quantization.name
        lines.append(f"weights stored as {name}: shown here, refused by every other verb")
    return tuple(lines)


def _form_name(arch: ArchSpec, tensor: StoredTensor) -> str:
    """The line of `bytes_by_dtype` that a stored tensor belongs to."""
    if tensor.transform.startswith("mxfp4"):
        return "MXFP4"
    if arch.quantization is not None and tensor.transform.startswith(("fp8", "int4", "foreign")):
        return arch.quantization.name
    return tensor.dtype


def _quantization_name(arch: ArchSpec) -> str | None:
    if arch.quantization is not None:
        return arch.quantization.name
    ffns = (layer.ffn for layer in arch.layers)
    packed = any(isinstance(ffn, MoESpec) and ffn.form == "mxfp4" for ffn in ffns)
    return "MXFP4" if packed else None


def active_parameters(arch: ArchSpec, elements: Counter[str]) -> int:
    """Parameters that one text token touches.

    Args:
        arch: the model.
        elements: stored elements per owner.
    """
    text = sum(count for owner, count in elements.items() if owner not in _IMAGE_OWNERS)
    selected = sum(_selected(arch, param) for param in inventory(arch))
    # A tied table is read once per token, as the head.
    table = 0 if arch.tie_word_embeddings else elements["embedding"]
    return text - elements["routed_expert"] + selected - table


def _selected(arch: ArchSpec, param: ParamSpec) -> int:
    if param.owner != "routed_expert" or param.layer is None:
        return 0
    ffn = arch.layers[param.layer].ffn
    assert isinstance(ffn, MoESpec), "routed experts stand in MoE layers only"
    return param.numel // ffn.num_experts * ffn.top_k


def _elements(param: ParamSpec, tensor: StoredTensor) -> int:
    """Parameters in a stored tensor: those of its part of the parameter, none in a scale."""
    if tensor.transform.endswith(("_scale", "_shape")):
        return 0
    if tensor.transform in ("mxfp4_packed", "int4_packed", "foreign_values"):
        return prod(param.shape[len(tensor.index):])
    return prod(tensor.shape)


def _layer(index: int, layer: LayerSpec) -> LayerSummary:
    ffn: Literal["dense", "moe"] = "dense" if isinstance(layer.ffn, DenseSpec) else "moe"
    if isinstance(layer.mixer, KDASpec):
        return LayerSummary(index, "kda", None, ffn)
    indexer = layer.mixer.indexer
    return LayerSummary(index, "mla", None if indexer is None else indexer.share, ffn)


def describe_unusual(arch: ArchSpec) -> tuple[str, ...]:
    """What few models have, one line each, in the order a token meets it."""
    kdas = [layer.mixer for layer in arch.layers if isinstance(layer.mixer, KDASpec)]
    mlas = [layer.mixer for layer in arch.layers if isinstance(layer.mixer, MLASpec)]
    moes = [layer.ffn for layer in arch.layers if isinstance(layer.ffn, MoESpec)]
    lines: list[str] = []
    if isinstance(arch.residual, AttnRes):
        lines.append(
            f"attention residuals: every {arch.residual.block_size} layers the stream is banked, "
            "and each site mixes the bank by a learned softmax"
        )
    if isinstance(arch.residual, HyperConnections):
        lines.append(
            f"hyper-connections: {arch.residual.streams} residual streams, mixed before each block "
            f"by a matrix with sums of 1 ({arch.residual.sinkhorn_steps} Sinkhorn steps)"
        )
    if kdas:
        lines += _unusual_kda(kdas[0], len(kdas))
    if mlas:
        lines += _unusual_mla(mlas)
    if moes:
        lines += _unusual_moe(moes[0], arch.hidden_size)
    form = arch.quantization
    if form is not None and form.readable:
        scale = next(part for part in form.parts if part.kind == "scale")
        rows, columns = scale.block
        lines.append(f"matrices are released in {form.name} with a scale per {rows} x {columns} block")
    if arch.vision is not None:
        lines.append(f"vision tower of {arch.vision.num_layers} layers with a patch-merging projector")
    return tuple(lines)


def _unusual_kda(spec: KDASpec, count: int) -> list[str]:
    gate = (
        "softplus decay without bound"
        if spec.gate_lower_bound is None
        else f"decay bounded at {spec.gate_lower_bound:g} per step"
    )
    return [f"linear attention (KDA) in {count} layers: a fixed state instead of a cache, {gate}"]


def _unusual_mla(specs: list[MLASpec]) -> list[str]:
    lines: list[str] = []
    spec, count = specs[0], len(specs)
    if spec.rope is None:
        lines.append(f"no position encoding (NoPE) in {count} latent attention (MLA) layers")
    elif spec.rope.yarn_factor is not None:
        lines.append(
            f"YaRN: rotary positions stretched {spec.rope.yarn_factor:g} times beyond "
            f"{spec.rope.yarn_original:,}"
        )
    if spec.gate is not None:
        lines.append(f"sigmoid output gate per {spec.gate} on MLA")
    if spec.indexer is not None:
        index = spec.indexer
        lines.append(
            f"sparse attention: an indexer of {index.heads} heads x {index.dim} picks the "
            f"top {index.top_k:,} keys per query"
        )
        if index.pool is not None:
            lines.append(
                f"the indexer sees pools of {index.pool} keys; a query's own unfinished pool is "
                f"{'always' if index.always_select_tail else 'never'} kept"
            )
    shared = sum(s.indexer is not None and s.indexer.share == "shared" for s in specs)
    if shared:
        lines.append(f"shared selections: {shared} of {count} layers reuse that of a layer before")
    return lines


def _unusual_moe(spec: MoESpec, hidden_size: int) -> list[str]:
    lines = [f"{spec.num_experts} routed experts per layer, {spec.top_k} per token"]
    if spec.groups > 1:
        lines.append(f"experts in {spec.groups} groups, of which a token keeps {spec.topk_groups}")
    if spec.latent is not None:
        lines.append(
            f"latent MoE: experts work on {spec.latent.size:,} of {hidden_size:,} channels"
        )
    if spec.form == "mxfp4":
        lines.append("routed experts are released in MXFP4, 4.25 bits per weight")
    if spec.activation.kind == "situ":
        up = spec.activation.linear_beta
        bound = "" if up is None else f", up branch within {up:g}"
        lines.append(f"SiTU activation: gate branch within {spec.activation.beta:g}{bound}")
    return lines
