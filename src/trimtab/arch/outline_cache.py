"""What a request keeps, and what a token touches, of any model that can be planned.

Knows: caches of every kind of mixer. Does not know: ranks but for tensor parallelism, clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.arch.outline import GatedDeltaSpec, GQASpec, Outline
from trimtab.arch.spec import KDASpec, MLASpec, MoESpec

_X = 2


@dataclass(frozen=True, slots=True)
class Request:
    """What one request keeps on a rank, in bytes.

    Args:
        per_token: cache that grows.
        state: recurrent states, fp32.
        tail: last inputs of convolutions, bf16.
        window: full caches of layers that see a window.
    """

    per_token: float
    state: float
    tail: float
    window: float

    @property
    def fixed(self) -> float:
        """What does not grow."""
        return self.state + self.tail + self.window

    def at(self, tokens: int) -> float:
        """Bytes at a length."""
        return self.per_token * tokens + self.fixed


def request_bytes(outline: Outline, tp: int) -> Request:
    """Caches of one request on one rank, bf16 but for recurrent states.

    Args:
        outline: the model.
        tp: ranks that share heads; latents are whole on each.
    """
    per_token = state = tail = window = 0.0
    for layer in outline.layers:
        m = layer.mixer
        if isinstance(m, KDASpec):
            state += 4 * m.num_heads * m.head_dim**2 / tp
            tail += _X * 3 * (m.conv_kernel - 1) * m.width / tp
        elif isinstance(m, GatedDeltaSpec):
            channels = 2 * m.key_heads * m.key_dim + m.value_heads * m.value_dim
            state += 4 * m.value_heads * m.key_dim * m.value_dim / tp
            tail += _X * (m.conv_kernel - 1) * channels / tp
        elif isinstance(m, GQASpec):
            size = _X * 2 * max(m.num_kv_heads, tp) / tp * m.head_dim
            if m.window is None:
                per_token += size
            else:
                window += size * m.window
        elif isinstance(m, MLASpec):
            per_token += _X * (m.kv_lora_rank + m.qk_rope_head_dim)
            if m.indexer is not None and m.indexer.share == "full":
                per_token += _X * m.indexer.dim / (m.indexer.pool or 1)
    return Request(per_token, state, tail, window)


def active_parameters(outline: Outline) -> float:
    """Parameters that one token touches, vision not counted and the table only as a tied head."""
    total = 0.0
    skipped = {"vision", "projector", *(() if outline.tie_word_embeddings else ("embedding",))}
    for param in outline.params:
        if param.owner in skipped:
            continue
        share = 1.0
        if param.owner == "routed_expert" and param.layer is not None:
            ffn = outline.layers[param.layer].ffn
            share = ffn.top_k / ffn.num_experts if isinstance(ffn, MoESpec) else 1.0
        total += param.numel * share
    return total
