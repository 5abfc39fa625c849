"""The loop over experts, forward and backward, with everything that is kept between the two.

    pre = W1_e x_t (+ lora);  h = act(pre);  y = W2_e h (+ lora);  m_t = sum_e w_te y     e ascending

Kept for the backward pass are the inputs, `pre` where the caller has room for it, and for a shared
B the [T, r] sums in front of it; rows are gathered and activations computed again, one expert at a
time. The base has no gradient unless it is trained. Rows of one expert are taken in blocks, so that
buffers do not grow with T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Some rows of one expert: `size` of them from `begin` on in the order of the experts."""

    expert: int
    begin: int
    size: int
    tokens: Tensor
    weights: Tensor


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
        self.matrices = tuple(
            _Matrices(source, self.dtype, size, new)
            for source, size in ((call.gate_up, (2 * inner, d)), (call.down, (d, inner)))
        )
        self.pairs = tuple(
            None if pair is None else _Pair(pair, self.dtype)
            for pair in (call.lora_gate_up, call.lora_down)
        )
        first = self.pairs[0]
        self.shared_in: Tensor | None = None
        if first is not None and first.shared:
            self.shared_in = self._dropped_tokens(first) @ first.A.flatten(0, -2).mT

    def forward(self, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """m, and what `backward` takes beside it.

        Args:
            keep: hold `pre` of all rows.

        Returns:
            m [T, D] in the dtype of x; the sums [T, r] in front of a shared B of down, or [0]; `pre`
            [T A, 2F], of which the rows of experts count, or [0].
        """
        x, call = self.x, self.call
        out = torch.zeros(x.shape, dtype=self.wide, device=x.device)
        down = self.pairs[1]
        sums = out.new_zeros(x.shape[0], down.rank) if down is not None and down.shared else None
        kept = x.new_empty((call.ids.numel(), 2 * call.width) if keep else 0)
        for block in self._blocks():
            pre = kept[block.begin : block.begin + block.size] if keep else self.pre[: block.size]
            gathered = self._gather(self.x, block, self.x_rows)
            self._before_activation(block, gathered, self._inner(block, gathered), pre)
            h, y = self.h[: block.size], self.y[: block.size]
            self.k.gate(call.activation, pre, h)
            self.k.times_transposed(h, self.matrices[1].of(block.expert), y)
            if down is not None:
                inner = self._dropped(down, h, block) @ down.a(block.expert).mT
                if sums is None:
                    y.addmm_(inner, down.b(block.expert).mT, alpha=down.scaling)
                else:
                    self.k.scatter(inner, block.tokens, block.weights, sums)
            self.k.scatter(y, block.tokens, block.weights, out)
        if down is not None and sums is not None:
            out += down.scaling * (sums @ down.B.to(self.wide).mT)
        sums = out.new_empty(0) if sums is None else sums
        return out.to(call.x.dtype), sums, kept

    def backward(self, grad: Tensor, sums: Tensor, kept: Tensor, trained: bool) -> Gradients:
        """Gradients of x, the weights, A and B of both pairs, and a trained base.

        Args:
            grad: of m, [T, D].
            sums: what the forward pass gave beside m.
            kept: likewise.
            trained: the base needs its gradient.
        """
        run = _Backward(self, grad.to(self.dtype).contiguous(), sums, kept, trained)
        for block in self._blocks():
            run.add(block)
        return run.finish()

    def _block_rows(self) -> int:
        widest = max(2 * self.call.width, self.x.shape[1])
        return max(128, min(1024, _BUFFER_BYTES // (widest * self.x.element_size())))

    def _blocks(self) -> Iterator[_Block]:
        experts, sizes = [], []
        for expert, count in enumerate(self.counts):
            pieces = -(-count // self.limit)
            experts += [expert] * pieces
            sizes += [count * (n + 1) // pieces - count * n // pieces for n in range(pieces)]
        begin = 0
        rows = zip(experts, sizes, self.tokens.split(sizes), self.weights.split(sizes), strict=True)
        for expert, size, tokens, weights in rows if sizes else ():
            yield _Block(expert, begin, size, tokens, weights)
            begin += size

    def _gather(self, x: Tensor, block: _Block, into: Tensor) -> Tensor:
        return self.k.gather(x, block.tokens, into[: block.size])

    def _before_activation(
        self, block: _Block, x: Tensor, inner: Tensor | None, pre: Tensor
    ) -> None:
        """Fill `pre` of a block from its rows and from A x of the adapter."""
        self.k.times_transposed(x, self.matrices[0].of(block.expert), pre)
        pair = self.pairs[0]
        if pair is not None and inner is not None:
            for columns, ranks, b in pair.parts(block.expert, self.call.width):
                pre[:, columns].addmm_(inner[:, ranks], b.mT, alpha=pair.scaling)

    def _inner(self, block: _Block, x: Tensor) -> Tensor | None:
        """A x of the gate_up adapter."""
        pair = self.pairs[0]
        if pair is None:
            return None
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


class _Matrices:
    """One expert's matrix after the other; one that has to be converted is so once in a row."""

    def __init__(
        self, source: ExpertMatrices, dtype: torch.dtype, size: tuple[int, int],
        new: Callable[..., Tensor],
    ) -> None:
        self._source, self._views = source, source.views(dtype)
        self._held, self._matrix = -1, new(size if self._views is None else 0)

    def of(self, expert: int) -> Tensor:
        """[out, in]; valid until that of another expert is asked for."""
        if self._views is not None:
            return self._views[expert]
        if expert != self._held:  # reading a packed one again costs as much as at first
            self._source.matrix(expert, self._matrix.dtype, self._matrix)
            self._held = expert
        return self._matrix


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

    def __init__(
        self, loop: ExpertLoop, grad: Tensor, sums: Tensor, kept: Tensor, trained: bool
    ) -> None:
        self.loop, self.grad, self.sums, self.kept = loop, grad, sums, kept
        call, x = loop.call, loop.x
        self.dx = torch.zeros(x.shape, dtype=loop.wide, device=x.device)
        self.dw_rows = torch.empty(len(loop.order), dtype=loop.wide, device=x.device)
        self.dh, self.g_rows = torch.empty_like(loop.h), torch.empty_like(loop.y)
        self.lora = tuple(
            None if tensor is None else torch.zeros_like(tensor)
            for pair in (call.lora_gate_up, call.lora_down)
            for tensor in ((None, None) if pair is None else (pair.A, pair.B))
        )
        self.base = tuple(
            torch.zeros_like(m.tensors[0]) if trained else None for m in (call.gate_up, call.down)
        )
        # Rows of x make `pre` again and meet its gradient in those of A and of the base.
        self.needs_x = trained or loop.pairs[0] is not None or not kept.numel()
        down = loop.pairs[1]
        self.shared_out = None if down is None or not down.shared else grad @ down.B
        self.d_shared_in = None
        if loop.shared_in is not None:
            self.d_shared_in = torch.zeros_like(loop.shared_in, dtype=loop.wide)

    def add(self, block: _Block) -> None:
        """One block's share of every gradient."""
        loop, end = self.loop, block.begin + block.size
        pre, h, dh = (whole[: block.size] for whole in (loop.pre, loop.h, self.dh))
        before, x, inner = pre, loop.x_rows[: block.size], None
        if self.needs_x:
            loop._gather(loop.x, block, loop.x_rows)
            inner = loop._inner(block, x)
        if self.kept.numel():
            before = self.kept[block.begin : end]
        else:
            loop._before_activation(block, x, inner, pre)
        g = loop._gather(self.grad, block, self.g_rows)
        loop.k.times(g, loop.matrices[1].of(block.expert), dh)
        if loop.pairs[1] is not None:
            loop.k.gate(loop.call.activation, before, h)
            self._down(block, g, h, dh)
        dw = self.dw_rows[block.begin : end]
        loop.k.gate_backward(loop.call.activation, before, dh, block.weights, pre, h, dw)
        if self.base[1] is not None:
            weighted = (h * block.weights.unsqueeze(-1)).to(g.dtype)
            _accumulate(self.base[1][block.expert], g.mT, weighted)
        if self.base[0] is not None:
            _accumulate(self.base[0][block.expert].flatten(0, -2), pre.mT, x)
        dx = loop.k.times(pre, loop.matrices[0].of(block.expert), loop.y[: block.size])
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
        dw = torch.zeros(call.weights.numel(), dtype=loop.wide, device=loop.x.device)
        dw[loop.order] = self.dw_rows
        dw = dw.view(call.weights.shape).to(call.weights.dtype)
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
