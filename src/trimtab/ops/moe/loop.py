"""The loop over experts, forward and backward, with everything that is kept between the two.

    pre = W1_e x_t (+ lora);  h = act(pre);  y = W2_e h (+ lora);  m_t = sum_e w_te y     e ascending

Kept for the backward pass are the inputs and, for a shared B, the [T, r] sums in front of it; rows
are gathered and activations computed again, one expert at a time. The base has no gradient unless
it is trained. Rows of one expert are taken in blocks, so that buffers do not grow with T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.arch.spec import ActivationSpec
from trimtab.ops.dropout import expert_key
from trimtab.ops.moe.kernels import Kernels
from trimtab.ops.moe.lora import ExpertLoRA
from trimtab.ops.moe.stored import ExpertMatrices
from trimtab.ops.precision import island_dtype

_BUFFER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """The inputs of one call; see `experts`."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: ActivationSpec
    lora_gate_up: ExpertLoRA | None = None
    lora_down: ExpertLoRA | None = None
    token_ids: Tensor | None = None

    @property
    def width(self) -> int:
        """F."""
        return self.gate_up.out_features // 2

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.tensors[0].shape[0]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the backward pass gives; None where the call has no such input."""

    x: Tensor
    weights: Tensor
    lora: tuple[Tensor | None, ...]
    base: tuple[Tensor | None, Tensor | None]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the products: that of x, but float32 for half precision on a CPU."""
    return island_dtype(x) if x.device.type == "cpu" else x.dtype


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of one expert."""

    expert: int
    tokens: Tensor
    weights: Tensor
    rows: slice


class ExpertLoop:
    """One pass over the experts that have rows.

    Args:
        call: the inputs.
        kernels: what runs between the products.
    """

    def __init__(self, call: ExpertCall, kernels: Kernels) -> None:
        self.call, self.k = call, kernels
        self.dtype, self.wide = compute_dtype(call.x), island_dtype(call.x)
        self.x = call.x.to(self.dtype).contiguous()
        self.order, self.counts = kernels.sort(call.ids, call.num_experts)
        self.tokens = self.order // call.ids.shape[1]
        self.weights = call.weights.to(self.wide).flatten()[self.order]
        self.limit = self._block_rows()
        rows = min(self.limit, max(self.counts, default=0))
        new = self.x.new_empty
        inner, d = call.width, self.x.shape[1]
        self.x_rows, self.pre = new(rows, d), new(rows, 2 * inner)
        self.h, self.y = new(rows, inner), new(rows, d)
        self.matrices = (new(2 * inner, d), new(d, inner)) if self._reads_through() else (None, None)
        self.held: list[tuple[int, Tensor | None]] = [(-1, None), (-1, None)]
        self.pairs = tuple(
            None if pair is None else _Pair(pair, self.dtype)
            for pair in (call.lora_gate_up, call.lora_down)
        )
        first = self.pairs[0]
        self.shared_in: Tensor | None = None
        if first is not None and first.shared:
            self.shared_in = self._dropped_tokens(first) @ first.A.flatten(0, -2).mT

    def forward(self) -> tuple[Tensor, Tensor]:
        """m [T, D] in the dtype of x, and the sums [T, r] in front of a shared B of down, or [0]."""
        x, call = self.x, self.call
        out = torch.zeros(x.shape, dtype=self.wide, device=x.device)
        down = self.pairs[1]
        sums = out.new_zeros(x.shape[0], down.rank) if down is not None and down.shared else None
        for block in self._blocks():
            self._activate(block, self._gather(self.x, block, self.x_rows))
            h, y = self.h[: len(block.tokens)], self.y[: len(block.tokens)]
            self.k.times_transposed(h, self._matrix(1, block.expert), y)
            if down is not None:
                inner = self._dropped(down, h, block) @ down.a(block.expert).mT
                if sums is None:
                    y.addmm_(inner, down.b(block.expert).mT, alpha=down.scaling)
                else:
                    self.k.scatter(inner, block.tokens, block.weights, sums)
            self.k.scatter(y, block.tokens, block.weights, out)
        if down is not None and sums is not None:
            out += down.scaling * (sums @ down.B.to(self.wide).mT)
        return out.to(call.x.dtype), x.new_empty(0, dtype=self.wide) if sums is None else sums

    def backward(self, grad: Tensor, sums: Tensor, trained: bool) -> Gradients:
        """Gradients of x, the weights, A and B of both pairs, and a trained base.

        Args:
            grad: of m, [T, D].
            sums: what the forward pass gave beside m.
            trained: the base needs its gradient.
        """
        run = _Backward(self, grad.to(self.dtype).contiguous(), sums, trained)
        for block in self._blocks():
            run.add(block)
        return run.finish()

    def _block_rows(self) -> int:
        widest = max(2 * self.call.width, self.x.shape[1])
        return max(128, min(1024, _BUFFER_BYTES // (widest * self.x.element_size())))

    def _reads_through(self) -> bool:
        """Whether matrices are converted, and so need memory of their own."""
        return any(
            m.tensors[0].dtype is not self.dtype
            for m in (self.call.gate_up, self.call.down)
        )

    def _blocks(self) -> Iterator[_Block]:
        begin = 0
        for expert, count in enumerate(self.counts):
            pieces = -(-count // self.limit)
            for piece in range(pieces):
                rows = slice(begin + count * piece // pieces, begin + count * (piece + 1) // pieces)
                yield _Block(expert, self.tokens[rows], self.weights[rows], rows)
            begin += count

    def _matrix(self, which: int, expert: int) -> Tensor:
        held, matrix = self.held[which]
        if matrix is None or held != expert:  # reading a packed one again costs as much as at first
            source = self.call.gate_up if which == 0 else self.call.down
            matrix = source.matrix(expert, self.dtype, self.matrices[which])
            self.held[which] = (expert, matrix)
        return matrix

    def _gather(self, x: Tensor, block: _Block, into: Tensor) -> Tensor:
        return self.k.gather(x, block.tokens, into[: len(block.tokens)])

    def _activate(self, block: _Block, x: Tensor) -> Tensor | None:
        """Fill `pre` and `h` of a block; returns A x of the gate_up adapter."""
        pre, h = self.pre[: len(x)], self.h[: len(x)]
        self.k.times_transposed(x, self._matrix(0, block.expert), pre)
        pair, inner = self.pairs[0], None
        if pair is not None:
            inner = self._inner(pair, block, x)
            for columns, ranks, b in pair.parts(block.expert, self.call.width):
                pre[:, columns].addmm_(inner[:, ranks], b.mT, alpha=pair.scaling)
        self.k.gate(self.call.activation, pre, h)
        return inner

    def _inner(self, pair: _Pair, block: _Block, x: Tensor) -> Tensor:
        if self.shared_in is not None:
            return self.shared_in[block.tokens]
        return self._dropped(pair, x, block) @ pair.a(block.expert).mT

    def _dropped(self, pair: _Pair, rows: Tensor, block: _Block) -> Tensor:
        """Rows of a block as the expert's A sees them."""
        if pair.rate == 0:
            return rows
        token_ids = self._token_ids()[block.tokens]
        return self.k.drop(rows, token_ids, expert_key(pair.key, block.expert), pair.rate)

    def _dropped_tokens(self, pair: _Pair, rows: Tensor | None = None) -> Tensor:
        """Tokens, x itself by default, as a shared A sees them."""
        rows = self.x if rows is None else rows
        return rows if pair.rate == 0 else self.k.drop(rows, self._token_ids(), pair.key, pair.rate)

    def _token_ids(self) -> Tensor:
        if self.call.token_ids is None:
            raise ValueError("dropout needs the global token numbers of the pack")
        return self.call.token_ids


class _Pair:
    """A and B in the dtype of the products."""

    def __init__(self, pair: ExpertLoRA, dtype: torch.dtype) -> None:
        self.A, self.B = pair.A.to(dtype), pair.B.to(dtype)
        self.scaling, self.rate, self.key, self.rank = pair.scaling, pair.rate, pair.key, pair.rank
        self.shared = pair.layout == "shared_outer"

    def a(self, expert: int) -> Tensor:
        """A of an expert, [r, in] or gate over up [2r, in]."""
        return self.A[expert].flatten(0, -2)

    def b(self, expert: int) -> Tensor:
        """B of an expert of down, [D, r]."""
        return self.B[expert]

    def parts(self, expert: int, width: int) -> Sequence[tuple[slice, slice, Tensor]]:
        """Pieces of B of gate_up: columns of `pre`, columns of A x, matrix."""
        b = self.B[expert]
        if self.A.dim() == (3 if self.shared else 4):
            return [
                (slice(n * width, (n + 1) * width), slice(n * self.rank, (n + 1) * self.rank), b[n])
                for n in range(2)
            ]
        return [(slice(0, 2 * width), slice(0, self.rank), b.flatten(0, 1))]


class _Backward:
    """The backward pass of a loop, block by block."""

    def __init__(self, loop: ExpertLoop, grad: Tensor, sums: Tensor, trained: bool) -> None:
        self.loop, self.grad, self.sums = loop, grad, sums
        call, x = loop.call, loop.x
        self.dx = torch.zeros(x.shape, dtype=loop.wide, device=x.device)
        self.dw = torch.zeros(call.weights.numel(), dtype=loop.wide, device=x.device)
        self.dh, self.g_rows = torch.empty_like(loop.h), torch.empty_like(loop.y)
        self.lora = tuple(
            None if tensor is None else torch.zeros_like(tensor)
            for pair in (call.lora_gate_up, call.lora_down)
            for tensor in ((None, None) if pair is None else (pair.A, pair.B))
        )
        self.base = tuple(
            torch.zeros_like(m.tensors[0]) if trained else None for m in (call.gate_up, call.down)
        )
        down = loop.pairs[1]
        self.shared_out = None if down is None or not down.shared else grad @ down.B
        self.d_shared_in = None
        if loop.shared_in is not None:
            self.d_shared_in = torch.zeros_like(loop.shared_in, dtype=loop.wide)

    def add(self, block: _Block) -> None:
        """One block's share of every gradient."""
        loop, n = self.loop, len(block.tokens)
        x, g = loop._gather(loop.x, block, loop.x_rows), loop._gather(self.grad, block, self.g_rows)
        inner = loop._activate(block, x)
        pre, h, dh = loop.pre[:n], loop.h[:n], self.dh[:n]
        loop.k.times(g, loop._matrix(1, block.expert), dh)
        self._down(block, g, h, dh)
        dw = self.dw.new_empty(n)
        loop.k.gate_backward(loop.call.activation, pre, dh, block.weights, h, dw)
        self.dw[loop.order[block.rows]] = dw
        if self.base[1] is not None:
            weighted = (h * block.weights.unsqueeze(-1)).to(g.dtype)
            _accumulate(self.base[1][block.expert], g.mT, weighted)
        if self.base[0] is not None:
            _accumulate(self.base[0][block.expert].flatten(0, -2), pre.mT, x)
        dx = loop.k.times(pre, loop._matrix(0, block.expert), loop.y[:n])
        if inner is not None:
            self._gate_up(block, x, inner, dx)
        loop.k.scatter(dx, block.tokens, None, self.dx)

    def finish(self) -> Gradients:
        """The gradients after the last block."""
        loop, call = self.loop, self.loop.call
        first, down = loop.pairs
        if first is not None and self.d_shared_in is not None:
            d_inner, a = self.d_shared_in.to(loop.dtype), first.A.flatten(0, -2)
            self.dx += loop._dropped_tokens(first, d_inner @ a)
            grad_a = self.lora[0]
            assert grad_a is not None
            _accumulate(grad_a.flatten(0, -2), d_inner.mT, loop._dropped_tokens(first))
        if down is not None and down.shared:
            grad_b = self.lora[3]
            assert grad_b is not None
            _accumulate(grad_b, self.grad.mT, self.sums.to(loop.dtype), down.scaling)
        dw = self.dw.view(call.weights.shape).to(call.weights.dtype)
        return Gradients(self.dx.to(call.x.dtype), dw, self.lora, (self.base[0], self.base[1]))

    def _down(self, block: _Block, g: Tensor, h: Tensor, dh: Tensor) -> None:
        """Gradients of the pair of down, and its share of dh."""
        loop, pair = self.loop, self.loop.pairs[1]
        if pair is None:
            return
        grad_a, grad_b = self.lora[2], self.lora[3]
        assert grad_a is not None and grad_b is not None
        a, dropped = pair.a(block.expert), loop._dropped(pair, h, block)
        column = block.weights.unsqueeze(-1)
        if self.shared_out is None:
            b = pair.b(block.expert)
            g_inner = g @ b
            weighted = ((dropped @ a.mT) * column).to(g.dtype)
            _accumulate(grad_b[block.expert], g.mT, weighted, pair.scaling)
        else:
            g_inner = self.shared_out[block.tokens]
        _accumulate(
            grad_a[block.expert], (g_inner * column).to(g.dtype).mT, dropped, pair.scaling
        )
        if pair.rate == 0:
            dh.addmm_(g_inner, a, alpha=pair.scaling)
        else:
            dh.add_(loop._dropped(pair, g_inner @ a, block), alpha=pair.scaling)

    def _gate_up(self, block: _Block, x: Tensor, inner: Tensor, dx: Tensor) -> None:
        """Gradients of the pair of gate_up, and its share of dx; `pre` holds its gradient."""
        loop, pair = self.loop, self.loop.pairs[0]
        assert pair is not None
        grad_a, grad_b = self.lora[0], self.lora[1]
        assert grad_a is not None and grad_b is not None
        pre, width = loop.pre[: len(x)], loop.call.width
        d_inner = torch.empty_like(inner)
        of_expert = grad_b[block.expert]
        for n, (columns, ranks, b) in enumerate(pair.parts(block.expert, width)):
            d_inner[:, ranks] = (pre[:, columns] @ b) * pair.scaling
            target = of_expert[n] if len(b) == width else of_expert.flatten(0, 1)
            _accumulate(target, pre[:, columns].mT, inner[:, ranks], pair.scaling)
        if self.d_shared_in is not None:
            loop.k.scatter(d_inner, block.tokens, None, self.d_shared_in)
            return
        a = pair.a(block.expert)
        dropped = loop._dropped(pair, x, block)
        _accumulate(grad_a[block.expert].flatten(0, -2), d_inner.mT, dropped)
        if pair.rate == 0:
            dx.addmm_(d_inner, a)
        else:
            dx.add_(loop._dropped(pair, d_inner @ a, block))


def _accumulate(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """total += factor * left right, in place, whatever its dtype."""
    if total.dtype is left.dtype:
        total.addmm_(left, right, alpha=factor)
    else:
        total.add_(left @ right, alpha=factor)
