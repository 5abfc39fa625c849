"""What Trimtab's operators work in while a layer's backward pass, or the loss, is at its peak.

Knows: buffers and gradients that live at one time. Does not know: what is kept between the passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.arch.spec import DenseSpec, KDASpec, MLASpec, MoESpec

_WIDE = 4
# Sizes of the operators' tiles and buffers, as they stand in `trimtab.ops`; a test compares them.
LOSS_ROWS, LOSS_TILE = 1024, 1 << 23
SCORE_TILE, QUERY_BLOCK = 1 << 20, 128
EXPERT_ROWS, EXPERT_BUFFER = 1024, 16 * 2**20
# Bytes up to which a layer keeps gate and up of all rows.
EXPERT_KEPT = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes at one time of the backward pass of a block, beside what the layer keeps."""

    bytes: float


def loss_bytes(rows: float, hidden: int, vocab: int) -> float:
    """Workspace of the loss over `rows` supervised tokens, in float32.

    Args:
        rows: of hidden states.
        hidden: D.
        vocab: size of the head.
    """
    block = min(rows, LOSS_ROWS)
    tile = min(block * vocab, LOSS_TILE)
    return _WIDE * (tile + 2 * block * hidden)


def ffn_moment(
    ffn: DenseSpec | MoESpec, hidden: int, tokens: int, width: int, adapters: float
) -> Moment:
    """The feed-forward block: gradients of its product and both factors, or rows of one expert.

    Args:
        ffn: the block.
        hidden: D.
        tokens: T.
        width: bytes of an activation.
        adapters: bytes of adapters on its routed experts, of which half a copy is made.
    """
    d = width * hidden * tokens
    if isinstance(ffn, DenseSpec):
        return Moment(d + 3.0 * width * ffn.intermediate_size * tokens)
    inner = ffn.latent.size if ffn.latent is not None else hidden
    widest = max(2 * ffn.intermediate_size, inner)
    rows = max(128, min(EXPERT_ROWS, EXPERT_BUFFER // (widest * _WIDE)))
    buffers = _WIDE * rows * (3 * inner + 5 * ffn.intermediate_size)
    # Order and token of each routed row, its weight and the gradient of that.
    routed = tokens * ffn.top_k * (8 + 8 + 4 + 4)
    # The gradient that comes in, and in float32 the one that goes out.
    shared = width * ffn.shared_intermediate_size * tokens
    return Moment(d + width * inner * tokens + _WIDE * inner * tokens + routed + buffers
                  + shared + adapters / 2)


def mixer_moment(
    mixer: KDASpec | MLASpec, hidden: int, tokens: int, sequence: int, width: int, *,
    gathers: bool = False,
) -> Moment:
    """Attention: gradients of query, key and value, and its buffers.

    Args:
        mixer: the block.
        hidden: D.
        tokens: T.
        sequence: longest record.
        width: bytes of an activation.
        gathers: selected latents are fetched, no keys per head are made.
    """
    d = width * hidden * tokens
    if isinstance(mixer, KDASpec):
        p = mixer.width * tokens
        # The incoming gradient and those of query, key, value and decay, while output, gate and the
        # input of the output projection are gone.
        return Moment(d + p * (3.0 * width + 2 * _WIDE) - p * 2.0 * width)
    heads = mixer.num_heads * tokens
    row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    gradients = width * heads * (mixer.qk_head_dim + mixer.qk_nope_head_dim + mixer.v_head_dim)
    if gathers:
        # Rows of latent and shared key, and their gradient, in place of keys and values.
        gradients = width * heads * mixer.qk_head_dim + 2 * _WIDE * row * tokens
    incoming = 2.0 * width * heads * mixer.v_head_dim
    rows = min(QUERY_BLOCK, tokens)
    scores = 2.0 * _WIDE * max(rows * sequence, min(SCORE_TILE, mixer.num_heads * rows * sequence))
    return Moment(d + gradients + incoming + scores)
