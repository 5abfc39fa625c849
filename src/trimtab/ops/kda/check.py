"""What the arguments of KDA must be, the same for every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.checks import check_floating, check_shape, require, values_readable


def check_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> None:
    """Check shapes and dtypes always, values where they are at hand.

    Raises:
        OperatorError: TT111, naming the argument, what it is and the rule.
    """
    check_shape("kda.k", k, "B T H K")
    batch, tokens, heads, key = k.shape
    sizes = {"B": batch, "T": tokens, "H": heads, "K": key}
    check_shape("kda.q", q, "B T H K", sizes)
    check_shape("kda.v", v, "B T H V", sizes)
    check_shape("kda.g", g, "B T H K", sizes)
    check_shape("kda.beta", beta, "B T H", sizes)
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        check_floating(f"kda.{name}", x)
    sequences = batch
    if cu_seqlens is not None:
        sequences = _check_borders(cu_seqlens, batch, tokens)
    if initial_state is not None:
        shape = {"N": sequences, "H": heads, "K": key, "V": v.shape[-1]}
        check_shape("kda.initial_state", initial_state, "N H K V", shape)
        check_floating("kda.initial_state", initial_state)
    if values_readable(g) and g.numel():
        largest = float(g.detach().amax())
        require(not largest > 0, "kda.g", "is a log decay: every value must be <= 0", largest)


def _check_borders(cu_seqlens: Tensor, batch: int, tokens: int) -> int:
    name = "kda.cu_seqlens"
    require(batch == 1, name, "needs the sequences in one row: B must be 1", f"B={batch}")
    integer = cu_seqlens.dtype in (torch.int32, torch.int64)
    require(integer, name, "must be int32 or int64", cu_seqlens.dtype)
    require(
        cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 1, name,
        "must have the shape [N + 1]", list(cu_seqlens.shape),
    )
    if values_readable(cu_seqlens):
        borders = cu_seqlens.tolist()
        covers = borders[0] == 0 and borders[-1] == tokens and borders == sorted(borders)
        require(covers, name, f"must rise from 0 to T={tokens}", borders[:8])
    return cu_seqlens.shape[0] - 1
