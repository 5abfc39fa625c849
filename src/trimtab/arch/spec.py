"""ArchSpec: what a model is, without tensors.

Knows: frozen value types for layers, experts, residual streams and the whole model.
Does not know: torch, files, the spelling of any config.json (see `readers`).

Shape letters: D hidden, H heads, K key dim, V value dim, L latent rank, E experts, A active
experts per token, F FFN width, W vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.arch.quantization import Quantization

FloatType = Literal["BF16", "F32"]

# The float32 machine epsilon. The tower's RMS norms are built without an eps; torch then takes
# that of float32, the dtype of the statistics (releases before 2.7 took the input's, 2^-7).
VISION_NORM_EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """Gated activation of an FFN.

    `swiglu`: silu(g) * u, with g clamped from above and u on both sides at `clamp` if given.
    `situ`: beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta).
    """

    kind: Literal["swiglu", "situ"] = "swiglu"
    beta: float = 1.0
    linear_beta: float | None = None
    clamp: float | None = None


@dataclass(frozen=True, slots=True)
class KDASpec:
    """Kimi Delta Attention.

    Args:
        num_heads: H, the same for q, k and v.
        head_dim: K = V.
        conv_kernel: taps of the causal depthwise convolution.
        gate_lower_bound: g = bound * sigmoid(exp(A_log) z) if given, else
            g = -exp(A_log) softplus(z).
        decay_rank: inner width of f_a/f_b; None means one full-rank f_proj.
        gate_rank: inner width of g_a/g_b; None means one full-rank g_proj.
        norm_eps: of the gated output norm.
        dtype: stored dtype of A_log and dt_bias.
        conv_dtype: stored dtype of the convolutions and of o_norm.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    decay_rank: int | None
    gate_rank: int | None
    norm_eps: float
    dtype: FloatType = "F32"
    conv_dtype: FloatType = "F32"

    @property
    def width(self) -> int:
        """H * K, the width of q, k, v and the gate."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the MLA rope slice.

    Args:
        theta: base of the frequencies.
        layout: `interleaved` turns channels (2i, 2i+1), `half` turns (i, i + width/2).
        yarn_factor: slow channels are stretched by it; None without YaRN.
        yarn_original: positions of the pretraining that YaRN stretches.
        yarn_beta_fast, yarn_beta_slow: turns over those positions between which the ramp runs.
        amplitude: factor on cosines and sines.
    """

    theta: float
    layout: Literal["interleaved", "half"] = "interleaved"
    yarn_factor: float | None = None
    yarn_original: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Lightning indexer that selects `top_k` keys for sparse attention.

    Args:
        heads: index heads.
        dim: index head dim.
        top_k: keys kept per query; a query with fewer visible keys keeps all.
        rope_layout: how the first qk_rope_head_dim channels of index queries and keys are turned;
            None where the indexer is not rotated.
        pool: tokens per pooled key, which a gate and slot biases weigh; None for a token indexer.
            Whole pools are selected, so `top_k` is a multiple of it.
        always_select_tail: a query also keeps the tokens of its own pool while that is incomplete.
        share: `shared` layers reuse the selection of the previous full layer.
        norm_eps: of the key LayerNorm.
    """

    heads: int
    dim: int
    top_k: int
    rope_layout: Literal["interleaved", "half"] | None = None
    pool: int | None = None
    always_select_tail: bool = True
    share: Literal["full", "shared"] = "full"
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention, optionally gated, optionally sparse."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    latent_eps: float
    rope: RopeSpec | None = None
    gate: Literal["channel", "head"] | None = None
    indexer: IndexerSpec | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One gated FFN of width F."""

    intermediate_size: int
    activation: ActivationSpec


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Routed experts work on a projection of the hidden state to `size`."""

    size: int
    norm_eps: float | None


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Token-choice sparse mixture of experts.

    Args:
        num_experts: E.
        top_k: A.
        intermediate_size: F of one routed expert.
        shared_intermediate_size: F of the fused shared expert, 0 without one.
        renormalise: weights sum to 1 before `scale`.
        scale: factor on the weights.
        groups, topk_groups: group-limited routing; 1 and 1 where off.
        latent: None where experts read the hidden state itself.
        form: how routed experts are stored.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    activation: ActivationSpec
    renormalise: bool
    scale: float
    groups: int = 1
    topk_groups: int = 1
    latent: LatentSpec | None = None
    form: Literal["plain", "mxfp4"] = "plain"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    mixer: KDASpec | MLASpec
    ffn: DenseSpec | MoESpec


@dataclass(frozen=True, slots=True)
class PlainResidual:
    """x + f(norm(x))."""


@dataclass(frozen=True, slots=True)
class AttnRes:
    """Attention residuals: every `block_size` layers the stream is banked and starts anew."""

    block_size: int
    eps: float


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """Manifold-constrained hyper-connections: parallel residual streams, mixed before each block.

    Args:
        streams: parallel residual streams.
        sinkhorn_steps: normalisations of the mixing matrix, each of rows and columns.
        eps: added to gates, mixing weights and the sums that divide them.
        norm_eps: of the unweighted RMS norm before the weights are computed.
    """

    streams: int
    sinkhorn_steps: int
    eps: float
    norm_eps: float

    @property
    def num_weights(self) -> int:
        """Mixing weights per block: one per stream to read and to write, and a square matrix."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """MoonViT tower with its projector (K3).

    Args:
        num_layers: encoder blocks.
        hidden_size: width of the tower.
        num_heads: attention heads.
        qkv_hidden_size: width of q, k and v each; a head has 4n channels, n per axis and part.
        intermediate_size: width of the encoder's MLP.
        patch_size: side of a square patch, in pixels.
        pos_emb_height, pos_emb_width: learned grid of positions, resized to the image.
        pos_emb_time: most frames of one item.
        merge_height, merge_width: patches that become one token.
        projector_eps: of the projector's RMS norm.
        norm_eps: of the tower's RMS norms, which the config does not name.
        rope_theta: base of the rotary frequencies of the two axes.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    qkv_hidden_size: int
    intermediate_size: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    merge_height: int
    merge_width: int
    projector_eps: float
    norm_eps: float = VISION_NORM_EPS
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.qkv_hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of the projector's input: the patches of one token side by side."""
        return self.hidden_size * self.merge_height * self.merge_width

    @property
    def max_frames(self) -> int | None:
        """Most frames of one item, None without a limit."""
        return self.pos_emb_time

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of one item of (frames, rows, columns) patches; frames are averaged.

        >>> VisionSpec(2, 8, 1, 8, 8, 14, 4, 4, 4, 2, 2, 1e-5).num_tokens((1, 4, 6))
        6
        """
        _, height, width = grid
        return (height // self.merge_height) * (width // self.merge_width)


@dataclass(frozen=True, slots=True)
class AxialVisionSpec:
    """Vision tower with axial rotary positions, and a merger that is its projector.

    A patch spans `patch_frames` frames; attention stays inside each such slice of an item. A
    strided convolution turns `merge_size` x `merge_size` patches into one token of the decoder's
    width.

    Args:
        num_layers: encoder blocks.
        hidden_size: width of the tower.
        num_heads: attention heads; their width is a multiple of 4.
        intermediate_size: F of the gated FFN of a block.
        patch_size: side of a square patch, in pixels.
        patch_frames: frames of one patch; a still image is repeated.
        merge_size: patches along each side of one token.
        out_hidden_size: width of a token, that of the decoder.
        projector_intermediate_size: F of the merger's gated FFN.
        activation: of both.
        norm_eps: of the RMS norms, those of query and key heads included.
        projector_eps: of the merger's layer norm.
        rope_theta: base of the rotary frequencies of the two axes.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    patch_frames: int
    merge_size: int
    out_hidden_size: int
    projector_intermediate_size: int
    activation: ActivationSpec
    norm_eps: float
    projector_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def merge_height(self) -> int:
        """Rows of patches in one token."""
        return self.merge_size

    @property
    def merge_width(self) -> int:
        """Columns of patches in one token."""
        return self.merge_size

    @property
    def max_frames(self) -> int | None:
        """Most slices of one item, None without a limit."""
        return None

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of one item of (slices, rows, columns) of patches."""
        slices, height, width = grid
        return slices * (height // self.merge_size) * (width // self.merge_size)


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """A whole model.

    Args:
        family: name of the weight map, such as `kimi_k3`.
        name: what users call it, such as `Kimi K3.1`.
        norm_eps: of layer norms and the final norm.
        dtype: stored dtype of everything that no other field says otherwise of.
        tie_word_embeddings: lm_head is the embedding table.
        bos_token_id, eos_token_id, pad_token_id: None where the config has none.
        image_token_id: placeholder id that image features replace.
        video_token_id: an id that no prompt may hold: videos use the placeholder of images.
        video_span: ids that open and close a video, whose placeholders lie between them.
        quantization: stored form of most matrices; None where they are stored as they are.
        mtp: multi-token prediction layers that follow the others in the files; they are recognised
            and skipped.
        ignored: config keys that were read and have no effect.
        unsupported: features present in the config that no verb supports yet.
    """

    family: str
    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    residual: PlainResidual | AttnRes | HyperConnections
    norm_eps: float
    max_position_embeddings: int
    dtype: FloatType = "BF16"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    video_span: tuple[int, int] | None = None
    vision: VisionSpec | AxialVisionSpec | None = None
    quantization: Quantization | None = None
    mtp: tuple[LayerSpec, ...] = ()
    ignored: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Depth."""
        return len(self.layers)
