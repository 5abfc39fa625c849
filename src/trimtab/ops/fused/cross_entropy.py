"""Cross-entropy in tiles of rows times vocabulary, with a running softmax.

For each block of rows the vocabulary passes once. Beside the running maximum m and sum s of the
softmax it carries sum_v exp(l_v - m) W_v, which divided by s is the gradient of the logsumexp, so
that a frozen head costs two matrix products and no second pass:

    d loss_r / d h_r = (1 + 2 z lse_r) softmax(l_r) W - W[label_r]

A head that is trained needs the incoming gradient before it can sum over rows; then the backward
pass computes the logits again, tile by tile.

Letters: R rows, D hidden, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.custom import custom_op
from trimtab.ops.precision import island_dtype, operand_dtype, upcast_blocks

IGNORE_INDEX = -100
_ROWS = 1024
_TILE_ELEMENTS = 1 << 23  # 32 MiB in float32: what one tile, or one upcast block of the head, may take


def fused_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0
) -> Tensor:
    """`token_losses_reference` without logits of more than one tile; arguments and result as there.

    With a frozen head its gradient is neither computed nor stored. Masked rows cost as much as
    others: leave them out where there are many.
    """
    # With a frozen head the gradient is finished in the forward pass, if anybody will ask for it.
    frozen = not weight.requires_grad
    ahead = frozen and hidden.requires_grad and torch.is_grad_enabled()
    losses: Tensor
    losses, _, _ = cross_entropy_fwd(hidden, weight, labels, z_loss, ahead)
    return losses


def workspace_bytes(shapes: Mapping[str, int]) -> int:
    """Bytes beside inputs and losses of the forward pass, for float32 rows and any head.

    Args:
        shapes: R, D, W.
    """
    r, d, w = shapes["R"], shapes["D"], shapes["W"]
    rows, block = min(r, _ROWS), _block(r, d, w, upcast=True)
    return 4 * (rows * block + block * d + 2 * rows * d + r * d)


@custom_op("trimtab::cross_entropy_fwd")
def cross_entropy_fwd(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, ahead: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [R], logsumexp [R] and, where `ahead`, d losses / d hidden [R, D] (else [0, D])."""
    dtype = island_dtype(hidden)
    count, width = hidden.shape
    losses = hidden.new_empty(count, dtype=dtype)
    lse = torch.empty_like(losses)
    grad = torch.empty_like(hidden) if ahead else hidden.new_empty(0, width)
    tiles = _Tiles(hidden, weight)
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        keep = labels[rows] != IGNORE_INDEX
        target = labels[rows].where(keep, 0).unsqueeze(1)
        picked, top, total, mixed = _stream(tiles, hidden[rows], target, ahead)
        norm = top + total.log()
        loss = norm - picked + z_loss * norm.square()
        losses[rows], lse[rows] = (loss.squeeze(1) * keep), norm.squeeze(1)
        if mixed is not None:
            mixed.mul_((1 + 2 * z_loss * norm) / total).sub_(weight[target.squeeze(1)].to(dtype))
            grad[rows] = mixed.mul_(keep.unsqueeze(1))
    return losses, lse, grad


def _stream(
    tiles: _Tiles, hidden: Tensor, target: Tensor, ahead: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The logit of each target, running maximum and sum [b, 1], and sum_v exp(l_v - max) W_v."""
    dtype = island_dtype(hidden)
    rows = hidden.to(tiles.operand)
    top = hidden.new_full((len(rows), 1), float("-inf"), dtype=dtype)
    total, picked = torch.zeros_like(top), torch.zeros_like(top)
    mixed = hidden.new_zeros(hidden.shape, dtype=dtype) if ahead else None
    for start, head in tiles.blocks():
        logits = tiles.logits(rows, head)
        place = target - start
        inside = (place >= 0) & (place < len(head))
        picked += logits.gather(1, place.clamp(0, len(head) - 1)).where(inside, 0)
        new = torch.maximum(top, logits.amax(1, keepdim=True))
        shrink = torch.exp(top - new)
        prob = logits.sub_(new).exp_()
        total = total * shrink + prob.sum(1, keepdim=True)
        if mixed is not None:
            _add_product(mixed.mul_(shrink), prob, head)
        top = new
    return picked, top, total, mixed


@custom_op("trimtab::cross_entropy_bwd")
def cross_entropy_bwd(
    grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, z_loss: float,
    need_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden [R, D] (else [0, D]) and of a trained head [W, D], logits computed again."""
    dtype = island_dtype(hidden)
    count, width = hidden.shape
    tiles = _Tiles(hidden, weight)
    keep = labels != IGNORE_INDEX
    scale = (grad * keep).to(dtype).unsqueeze(1)
    norm = lse.unsqueeze(1)
    slope = scale * (1 + 2 * z_loss * norm)
    target = labels.where(keep, 0).unsqueeze(1)
    d_hidden = hidden.new_zeros((count if need_hidden else 0, width), dtype=dtype)
    d_weight = torch.empty_like(weight)
    for start, head in tiles.blocks():
        d_head = hidden.new_zeros(head.shape, dtype=dtype)
        for first in range(0, count, _ROWS):
            rows = slice(first, min(first + _ROWS, count))
            wide = hidden[rows].to(tiles.operand)
            delta = tiles.logits(wide, head).sub_(norm[rows]).exp_().mul_(slope[rows])
            place = target[rows] - start
            inside = (place >= 0) & (place < len(head))
            delta.scatter_add_(1, place.clamp(0, len(head) - 1), (-scale[rows]).where(inside, 0))
            _add_product(d_head, delta.mT, wide)
            if need_hidden:
                _add_product(d_hidden[rows], delta, head)
        d_weight[start : start + len(head)] = d_head
    return d_hidden.to(hidden.dtype), d_weight


class _Tiles:
    """The head in blocks, and one buffer that every tile of logits is written to."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.operand = operand_dtype(hidden)
        self._weight, self._wide = weight, island_dtype(hidden)
        upcast = weight.dtype is not self.operand
        self._block = _block(len(hidden), hidden.shape[1], len(weight), upcast)
        size = min(len(hidden), _ROWS) * self._block
        self._buffer = hidden.new_empty(size, dtype=self.operand)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(first vocabulary entry, [b, D] in the dtype of products) of each block."""
        for where, block in upcast_blocks(self._weight, self.operand, self._block):
            yield where.start, block

    def logits(self, rows: Tensor, head: Tensor) -> Tensor:
        """[rows, b] in at least float32; overwritten by the next call."""
        out = self._buffer[: len(rows) * len(head)].view(len(rows), len(head))
        return torch.mm(rows, head.mT, out=out).to(self._wide)


def _block(r: int, d: int, w: int, upcast: bool) -> int:
    block = _TILE_ELEMENTS // max(1, min(r, _ROWS))
    if upcast:
        block = min(block, _TILE_ELEMENTS // d)
    return max(1, min(w, block))


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, the product in b's dtype."""
    if a.dtype is b.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a.to(b.dtype) @ b)


@cross_entropy_fwd.register_fake
def _fake_fwd(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, ahead: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del weight, labels, z_loss
    count, width = hidden.shape
    losses = hidden.new_empty(count, dtype=island_dtype(hidden))
    return losses, torch.empty_like(losses), hidden.new_empty(count if ahead else 0, width)


@cross_entropy_bwd.register_fake
def _fake_bwd(
    grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, z_loss: float,
    need_hidden: bool,
) -> tuple[Tensor, Tensor]:
    del grad, labels, lse, z_loss
    count, width = hidden.shape
    return hidden.new_empty(count if need_hidden else 0, width), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, labels, z_loss, ahead = inputs
    ctx.set_materialize_grads(False)
    ctx.z_loss, ctx.ahead = z_loss, ahead
    _, lse, grad = output
    ctx.mark_non_differentiable(lse, grad)
    ctx.save_for_backward(*((grad,) if ahead else (hidden, weight, labels, lse)))


def _backward(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    if ctx.ahead:
        (ready,) = ctx.saved_tensors
        return (ready * grad.unsqueeze(1)).to(ready.dtype), None, None, None, None
    hidden, weight, labels, lse = ctx.saved_tensors
    need_hidden = ctx.needs_input_grad[0]
    d_hidden, d_weight = cross_entropy_bwd(
        grad, hidden, weight, labels, lse, ctx.z_loss, need_hidden
    )
    return d_hidden if need_hidden else None, d_weight, None, None, None


cross_entropy_fwd.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.trimtab.cross_entropy_fwd)
def _flops_fwd(
    hidden: tuple[int, int], weight: tuple[int, int], labels: object, z_loss: float, ahead: bool,
    **_: object,
) -> int:
    del labels, z_loss
    return 2 * hidden[0] * hidden[1] * weight[0] * (2 if ahead else 1)


@register_flop_formula(torch.ops.trimtab.cross_entropy_bwd)
def _flops_bwd(
    grad: object, hidden: tuple[int, int], weight: tuple[int, int], labels: object, lse: object,
    z_loss: float, need_hidden: bool, **_: object,
) -> int:
    del grad, labels, lse, z_loss
    return 2 * hidden[0] * hidden[1] * weight[0] * (3 if need_hidden else 2)
