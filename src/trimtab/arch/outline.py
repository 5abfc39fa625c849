"""Outline: what the planner needs of a model, whether Trimtab trains its family or only plans it.

Knows: mixers that no module of ours has (grouped-query attention, gated DeltaNet), the parameters
of every layer and the bytes that each takes in the released files. Does not know: config fields
(see `readers`), torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trimtab.arch.maps import census
from trimtab.arch.params import Owner, ParamSpec, ffn_params, inventory, mla_params, mtp_inventory
from trimtab.arch.spec import (
    ArchSpec,
    AttnRes,
    AxialVisionSpec,
    DenseSpec,
    HyperConnections,
    KDASpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    PlainResidual,
    VisionSpec,
)
from trimtab.arch.stored import DTYPE_BYTES

_MXFP4_BITS = 4.25


@dataclass(frozen=True, slots=True)
class GQASpec:
    """Grouped-query softmax attention.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of each.
        qk_norm: query and key heads are normed.
        bias: q, k and v have a bias, and o with `out_bias`.
        out_bias: the output projection has one.
        gate: a sigmoid gate as wide as the queries multiplies the output.
        window: keys that a query sees at most, None without a limit.
        sinks: a learned logit per head joins the softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False
    out_bias: bool = False
    gate: bool = False
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet: linear attention with one decay per head.

    Args:
        key_heads, key_dim: of queries and keys.
        value_heads, value_dim: of values, output and gate.
        conv_kernel: taps of the causal depthwise convolution.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_kernel: int = 4


OutlineMixer = KDASpec | MLASpec | GQASpec | GatedDeltaSpec


@dataclass(frozen=True, slots=True)
class OutlineLayer:
    """One decoder layer.

    Args:
        mixer: attention of any kind.
        ffn: feed-forward block.
        expert_bias: router and projections of routed experts have biases.
        selection_bias: the router adds a bias before it selects.
        shared_gate: a sigmoid gate of one channel multiplies the shared expert.
        gated: feed-forward blocks have a gate beside their first projection.
        ffn_bias: projections of a dense feed-forward block have biases.
        norm_bias: norms have a bias beside their weight.
    """

    mixer: OutlineMixer
    ffn: DenseSpec | MoESpec
    expert_bias: bool = False
    selection_bias: bool = True
    shared_gate: bool = False
    gated: bool = True
    ffn_bias: bool = False
    norm_bias: bool = False


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as the planner sees it.

    Args:
        family: its `model_type`.
        name: what users call it.
        hidden_size: D.
        vocab_size: W.
        layers: the decoder.
        mtp: multi-token prediction layers, which a plan may count.
        residual: residual stream.
        vision: tower, None without one.
        tie_word_embeddings: the head is the input table.
        max_position_embeddings: longest context of the release.
        params: every parameter, by forward order.
        mtp_params: those of the prediction layers.
        stored_bytes: bytes of each parameter in the released files, by name.
        is_trained: Trimtab reads and trains the family; else it only plans it.
    """

    family: str
    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[OutlineLayer, ...]
    mtp: tuple[OutlineLayer, ...]
    residual: PlainResidual | AttnRes | HyperConnections
    vision: VisionSpec | AxialVisionSpec | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    params: tuple[ParamSpec, ...]
    mtp_params: tuple[ParamSpec, ...]
    stored_bytes: Mapping[str, int]
    is_trained: bool

    @property
    def total_parameters(self) -> int:
        """Elements of all parameters, prediction layers not counted."""
        return sum(param.numel for param in self.params)

    @property
    def num_layers(self) -> int:
        """Depth."""
        return len(self.layers)


def outline_of(arch: ArchSpec) -> Outline:
    """The outline of a model that Trimtab reads.

    >>> from trimtab.arch.load import load_arch
    >>> from trimtab.arch.presets import preset_config
    >>> outline = outline_of(load_arch(preset_config("kimi-k3")))
    >>> sum(outline.stored_bytes.values())
    1560860324864
    """
    stored: Counter[str] = Counter()
    for param, tensor, count in census(arch):
        stored[param.name] += tensor.num_bytes * count
    for param, tensor, count in census(arch, mtp=True) if arch.mtp else ():
        stored[param.name] += tensor.num_bytes * count
    return Outline(
        family=arch.family, name=arch.name, hidden_size=arch.hidden_size,
        vocab_size=arch.vocab_size, layers=_layers(arch.layers), mtp=_layers(arch.mtp),
        residual=arch.residual, vision=arch.vision,
        tie_word_embeddings=arch.tie_word_embeddings,
        max_position_embeddings=arch.max_position_embeddings,
        params=inventory(arch),
        mtp_params=mtp_inventory(arch, tables=False) if arch.mtp else (),
        stored_bytes=dict(stored), is_trained=True,
    )


def _layers(layers: tuple[LayerSpec, ...]) -> tuple[OutlineLayer, ...]:
    return tuple(OutlineLayer(layer.mixer, layer.ffn) for layer in layers)


def planned_outline(
    family: str, name: str, hidden_size: int, vocab_size: int, layers: tuple[OutlineLayer, ...],
    *, tied: bool, max_positions: int, fp8_block: tuple[int, int] | None = None,
    learned_positions: int = 0,
) -> Outline:
    """The outline of a model that is only planned: plain residual, no vision.

    Args:
        family: its `model_type`.
        name: what users call it.
        hidden_size: D.
        vocab_size: W.
        layers: the decoder.
        tied: the head is the input table.
        max_positions: longest context of the release.
        fp8_block: rows and columns that share an fp32 scale, where the matrices of the layers are
            released in FP8; else all but MXFP4 experts is BF16.
        learned_positions: rows of a table of positions, 0 without one.
    """
    params = tuple(_planned_params(hidden_size, vocab_size, layers, tied, learned_positions))
    return Outline(
        family=family, name=name, hidden_size=hidden_size, vocab_size=vocab_size, layers=layers,
        mtp=(), residual=PlainResidual(), vision=None, tie_word_embeddings=tied,
        max_position_embeddings=max_positions, params=params, mtp_params=(),
        stored_bytes={param.name: _released(param, fp8_block) for param in params},
        is_trained=False,
    )


# Matrices that FP8 releases leave in BF16.
_NEVER_FP8 = ("mlp.router.weight", "mlp.shared_expert_gate.weight", "linear_attn.in_proj_ba.weight")


def _released(param: ParamSpec, fp8_block: tuple[int, int] | None) -> int:
    if param.form == "mxfp4":
        return round(param.numel * _MXFP4_BITS / 8)
    is_matrix = len(param.shape) > 1 and param.layer is not None and "conv" not in param.name
    if fp8_block is None or not is_matrix or param.name.endswith((*_NEVER_FP8, "bias")):
        return param.numel * DTYPE_BYTES[param.dtype]
    rows, columns = param.shape[-2:]
    blocks = -(-rows // fp8_block[0]) * -(-columns // fp8_block[1])
    return param.numel + 4 * blocks * (param.numel // (rows * columns))


def _planned_params(
    d: int, w: int, layers: tuple[OutlineLayer, ...], tied: bool, positions: int
) -> Iterator[ParamSpec]:
    yield ParamSpec("embed.weight", (w, d), "BF16", ("vocab", "hidden"), "embedding")
    if positions:
        shape = (positions, d)
        yield ParamSpec("positions.weight", shape, "BF16", ("position", "hidden"), "embedding")
    for index, layer in enumerate(layers):
        make = _Leaf(index)
        yield make("input_layernorm.weight", (d,), ("hidden",), "norm")
        yield from _mixer_params(make, layer.mixer, d)
        yield make("post_attention_layernorm.weight", (d,), ("hidden",), "norm")
        if layer.norm_bias:
            yield make("input_layernorm.bias", (d,), ("hidden",), "norm")
            yield make("post_attention_layernorm.bias", (d,), ("hidden",), "norm")
        for param in ffn_params(layer.ffn, index, d, selection_bias=layer.selection_bias):
            if layer.gated:
                yield param
            elif not param.name.endswith("gate_proj.weight"):
                yield _without_gate(param)
        if layer.ffn_bias and isinstance(layer.ffn, DenseSpec):
            wide = layer.ffn.intermediate_size * (2 if layer.gated else 1)
            yield make("mlp.up_proj.bias", (wide,), ("ffn",), "dense_ffn")
            yield make("mlp.down_proj.bias", (d,), ("hidden",), "dense_ffn")
        if layer.expert_bias and isinstance(layer.ffn, MoESpec):
            e, f = layer.ffn.num_experts, layer.ffn.intermediate_size
            yield make("mlp.router.bias", (e,), ("expert",), "router")
            axes = ("expert", "gate_up", "ffn")
            yield make("mlp.experts.gate_up_bias", (e, 2, f), axes, "routed_expert")
            yield make("mlp.experts.down_bias", (e, d), ("expert", "hidden"), "routed_expert")
        if layer.shared_gate and isinstance(layer.ffn, MoESpec):
            yield make("mlp.shared_expert_gate.weight", (1, d), ("one", "hidden"), "router")
    yield ParamSpec("norm.weight", (d,), "BF16", ("hidden",), "norm")
    if layers[-1].norm_bias:
        yield ParamSpec("norm.bias", (d,), "BF16", ("hidden",), "norm")
    if not tied:
        yield ParamSpec("lm_head.weight", (w, d), "BF16", ("vocab", "hidden"), "head")


def _without_gate(param: ParamSpec) -> ParamSpec:
    """The first projection of experts without a gate is one matrix, not two."""
    if param.axes[1:2] != ("gate_up",):
        return param
    return replace(param, shape=(param.shape[0], 1, *param.shape[2:]))


@dataclass(frozen=True, slots=True)
class _Leaf:
    layer: int

    def __call__(
        self, leaf: str, shape: tuple[int, ...], axes: tuple[str, ...], owner: Owner
    ) -> ParamSpec:
        name = f"layers.{self.layer}.{leaf}"
        return ParamSpec(name, shape, "BF16", axes, owner, layer=self.layer)


def _mixer_params(make: _Leaf, mixer: OutlineMixer, d: int) -> Iterator[ParamSpec]:
    if isinstance(mixer, GQASpec):
        yield from _gqa(make, mixer, d)
    elif isinstance(mixer, GatedDeltaSpec):
        yield from _gated_delta(make, mixer, d)
    elif isinstance(mixer, MLASpec):
        yield from mla_params(mixer, make.layer, d)
    else:
        raise TypeError(f"no planned family has {type(mixer).__name__}")


def _gqa(make: _Leaf, spec: GQASpec, d: int) -> Iterator[ParamSpec]:
    at, q, kv = "self_attn", spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for leaf, rows in (("q_proj", q * (2 if spec.gate else 1)), ("k_proj", kv), ("v_proj", kv)):
        yield make(f"{at}.{leaf}.weight", (rows, d), ("heads", "hidden"), "gqa")
        if spec.bias:
            yield make(f"{at}.{leaf}.bias", (rows,), ("heads",), "gqa")
    if spec.qk_norm:
        yield make(f"{at}.q_norm.weight", (spec.head_dim,), ("head_dim",), "gqa")
        yield make(f"{at}.k_norm.weight", (spec.head_dim,), ("head_dim",), "gqa")
    if spec.sinks:
        yield make(f"{at}.sinks", (spec.num_heads,), ("heads",), "gqa")
    yield make(f"{at}.o_proj.weight", (d, q), ("hidden", "heads"), "gqa")
    if spec.out_bias:
        yield make(f"{at}.o_proj.bias", (d,), ("hidden",), "gqa")


def _gated_delta(make: _Leaf, spec: GatedDeltaSpec, d: int) -> Iterator[ParamSpec]:
    at = "linear_attn"
    key, value = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    wide = 2 * key + 2 * value
    yield make(f"{at}.in_proj_qkvz.weight", (wide, d), ("heads", "hidden"), "gated_delta")
    gates = 2 * spec.value_heads
    yield make(f"{at}.in_proj_ba.weight", (gates, d), ("heads", "hidden"), "gated_delta")
    shape = (2 * key + value, 1, spec.conv_kernel)
    yield make(f"{at}.conv1d.weight", shape, ("heads", "one", "taps"), "gated_delta")
    yield make(f"{at}.A_log", (spec.value_heads,), ("heads",), "gated_delta")
    yield make(f"{at}.dt_bias", (spec.value_heads,), ("heads",), "gated_delta")
    yield make(f"{at}.norm.weight", (spec.value_dim,), ("head_dim",), "gated_delta")
    yield make(f"{at}.out_proj.weight", (d, value), ("hidden", "heads"), "gated_delta")
