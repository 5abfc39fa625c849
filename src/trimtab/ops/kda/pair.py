"""The forward and backward of fast KDA paths as custom operators of torch.

Forward returns the outputs, the final states and, for training, the states that backward begins
its segments with; nothing else is kept beside the inputs. What the two paths share stands here:
schemas, fake kernels, autograd and FLOP formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.custom import CustomOp
from trimtab.ops.precision import island_dtype

CHUNK = 32
# exp(-80) is far below float32 resolution of the retained state: a harder gate changes nothing.
GATE_FLOOR = -80.0

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor? initial_state, "
    "Tensor cu_seqlens, bool save, float? gate_bound) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor dout, Tensor dfinal, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "float scale, Tensor states, Tensor cu_seqlens, float? gate_bound) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


# The two functions take the arguments of their schema.
Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Backward = Callable[..., Gradients]


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the states kept for backward lie: one per segment of each sequence.

    Sequence n owns the rows from `cu_seqlens[n] // tokens + n` on. Ranges of two sequences never
    meet, and the number of rows follows from T and N alone, which fake tensors need.

    Args:
        tokens: tokens per segment.
    """

    tokens: int

    def rows(self, total: int, sequences: int) -> int:
        """States of a pack."""
        return total // self.tokens + sequences

    def first(self, sequence: int, begin: int) -> int:
        """Row of the first segment of a sequence that begins at token `begin`."""
        return begin // self.tokens + sequence

    def empty(self, g: Tensor, v: Tensor, sequences: int, save: bool) -> Tensor:
        """Room for the states of a call; none unless they are to be kept."""
        rows = self.rows(g.shape[0], sequences) if save else 0
        return g.new_empty(rows, *g.shape[1:], v.shape[-1], dtype=island_dtype(g))


def define_pair(
    name: str, forward: Forward, backward: Backward, segments: Segments
) -> Forward:
    """Register `trimtab::NAME_fwd` and `trimtab::NAME_bwd` and return the former."""
    fwd = CustomOp(f"trimtab::{name}_fwd", forward, _FORWARD)
    bwd = CustomOp(f"trimtab::{name}_bwd", backward, _BACKWARD)

    @fwd.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
        initial_state: Tensor | None, cu_seqlens: Tensor, save: bool, gate_bound: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequences = cu_seqlens.shape[0] - 1
        final = g.new_empty(sequences, *g.shape[1:], v.shape[-1], dtype=island_dtype(g))
        return torch.empty_like(v), final, segments.empty(g, v, sequences, save)

    @bwd.register_fake
    def _(
        dout: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        scale: float, states: Tensor, cu_seqlens: Tensor, gate_bound: float | None,
    ) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in (q, k, v, g, beta, dfinal))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, g, beta, ctx.scale, initial, cu_seqlens, _, ctx.gate_bound = inputs
        ctx.initial_given = initial is not None
        ctx.save_for_backward(q, k, v, g, beta, output[2], cu_seqlens)

    def gradients(ctx: Any, dout: Tensor, dfinal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states, cu_seqlens = ctx.saved_tensors
        dq, dk, dv, dg, dbeta, dinitial = bwd(
            dout.contiguous(), dfinal.contiguous(), *inputs, ctx.scale, states, cu_seqlens,
            ctx.gate_bound,
        )
        given = dinitial if ctx.initial_given else None
        return dq, dk, dv, dg, dbeta, None, given, None, None, None

    fwd.register_autograd(gradients, setup_context=keep)
    register_flop_formula(fwd.packet)(_forward_flops)
    register_flop_formula(bwd.packet)(_backward_flops)
    return fwd


def kda_flops(tokens: int, heads: int, key: int, value: int) -> tuple[int, int]:
    """FLOPs of forward and of backward, which runs the forward again; decays are not counted.

    Products with a state cost C K V multiply-adds per chunk (3 forward; 2 again and 6 backward),
    the scores of the lower triangle C (C + 1) / 2 per channel.
    """
    triangle, strict = CHUNK * (CHUNK + 1) // 2, CHUNK * (CHUNK - 1) // 2
    chunk_heads = tokens * heads / CHUNK
    state = CHUNK * key * value
    scores = 2 * triangle * key
    forward = 3 * state + scores + (triangle + strict) * value
    backward = 8 * state + 3 * scores + (2 * strict + 3 * triangle) * value
    return int(2 * forward * chunk_heads), int(2 * backward * chunk_heads)


def _forward_flops(
    q: tuple[int, int, int], k: tuple[int, int, int], v: tuple[int, int, int], *_: object,
    **__: object,
) -> int:
    return kda_flops(*k, v[-1])[0]


def _backward_flops(
    dout: tuple[int, int, int], dfinal: tuple[int, ...], q: tuple[int, int, int], *_: object,
    **__: object,
) -> int:
    return kda_flops(*q, dout[-1])[1]


def run_pair(
    fwd: Forward, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor, scale: float, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, gate_bound: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Call a forward operator with the arguments of `kda_reference`, already checked."""
    if cu_seqlens is None:
        batch, tokens = k.shape[:2]
        cu_seqlens = torch.arange(batch + 1) * tokens
    given = (q, k, v, g, beta) if initial_state is None else (q, k, v, g, beta, initial_state)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    flat = [x.flatten(0, 1).contiguous() for x in (q, k, v, g, beta)]
    state = None if initial_state is None else initial_state.to(island_dtype(g)).contiguous()
    out, final, _ = fwd(*flat, scale, state, cu_seqlens.long(), save, gate_bound)
    return out.view(v.shape), final if output_final_state else None
