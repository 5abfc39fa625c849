"""The two operators of sparse attention: what selects keys, and what attends to them.

Knows: their implementations, when each runs, and the checks of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trimtab.ops.attention import native
from trimtab.ops.attention.cost import tiles_are_faster
from trimtab.ops.attention.gather import BUFFER_ELEMENTS as GATHER_ELEMENTS
from trimtab.ops.attention.gather import gathered_attention
from trimtab.ops.attention.packs import QUERY_BLOCK, PackBorders
from trimtab.ops.attention.pooling import PoolRule
from trimtab.ops.attention.reference import attention_reference
from trimtab.ops.attention.select import check_index, select, select_reference
from trimtab.ops.attention.selection import Selection
from trimtab.ops.attention.tiles import BUFFER_ELEMENTS, tiled_attention
from trimtab.ops.checks import check_floating, check_shape, require
from trimtab.ops.registry import Implementation, OpCase, Operator
from trimtab.ops.triton import support as triton


@dataclass(frozen=True, slots=True)
class LatentKeys:
    """Keys and values of a pack, as the latent they are made of.

    Args:
        latent: [T, L], normed.
        shared: [T, P], key part that all heads share, rotated where the model rotates.
        expand: returns the keys without the shared part, and values, [T, H, K + V].
        weight: returns the map from latent to those, [H, K + V, L], adapters included; None where
            they are no plain map of the latent, as with dropout on the adapter.
        value_dim: V.
    """

    latent: Tensor
    shared: Tensor
    expand: Callable[[], Tensor]
    weight: Callable[[], Tensor] | None
    value_dim: int


def _attention_case(
    q: Tensor, keys: LatentKeys, scale: float, borders: PackBorders, selection: Selection | None
) -> OpCase:
    check_shape("attention.q", q, "T H K", {"T": borders.total})
    check_shape("attention.latent", keys.latent, "T L", {"T": borders.total})
    check_shape("attention.shared", keys.shared, "T P", {"T": borders.total})
    for name, x in (("q", q), ("latent", keys.latent), ("shared", keys.shared)):
        check_floating(f"attention.{name}", x)
    rule = f"must be below the {q.shape[2]} channels of a query"
    require(keys.shared.shape[1] < q.shape[2], "attention.shared", rule, list(keys.shared.shape))
    require(scale > 0, "attention.scale", "must be positive", scale)
    if selection is not None:
        same = selection.borders.lengths == borders.lengths
        require(same, "attention.selection", f"must be of the pack {borders.lengths}", selection.borders.lengths)
    sizes = {
        "T": borders.total, "M": borders.mean_visible, "H": q.shape[1], "K": q.shape[2],
        "V": keys.value_dim, "L": 0 if keys.weight is None else keys.latent.shape[1],
        "P": keys.shared.shape[1], "S": 0 if selection is None else selection.width,
    }
    return OpCase(q.device.type, q.dtype, sizes)


def _reference(
    q: Tensor, keys: LatentKeys, scale: float, borders: PackBorders, selection: Selection | None
) -> Tensor:
    kv = keys.expand()
    nope = q.shape[2] - keys.shared.shape[1]
    shared = keys.shared.unsqueeze(1).expand(-1, q.shape[1], -1)
    k = torch.cat((kv[..., :nope], shared), -1)
    ends = torch.tensor((0, *borders.lengths)).cumsum(0)
    chosen = None if selection is None else selection.all_positions()
    return attention_reference(q, k, kv[..., nope:], scale, ends, chosen)


def _tiles(
    q: Tensor, keys: LatentKeys, scale: float, borders: PackBorders,
    selection: Selection | None, *, use_native: bool,
) -> Tensor:
    kv = keys.expand()
    check_shape("attention.expand()", kv, "T H W", {"T": q.shape[0], "H": q.shape[1]})
    return tiled_attention(q, kv, keys.shared, scale, borders, selection, native=use_native)


def _gather(
    q: Tensor, keys: LatentKeys, scale: float, borders: PackBorders, selection: Selection | None
) -> Tensor:
    assert keys.weight is not None and selection is not None, "supports() asks for both"
    weight = keys.weight()
    rank = keys.latent.shape[1]
    check_shape("attention.weight()", weight, "H W L", {"H": q.shape[1], "L": rank})
    return gathered_attention(q, keys.latent, keys.shared, weight, scale, selection)


def _triton(
    q: Tensor, keys: LatentKeys, scale: float, borders: PackBorders, selection: Selection | None
) -> Tensor:
    from trimtab.ops.triton.attention import attention_triton

    assert keys.weight is not None and selection is not None, "supports() asks for both"
    return attention_triton(q, keys.latent, keys.shared, keys.weight(), scale, selection)


def _triton_supports(case: OpCase) -> str | None:
    return triton.supports(case) or _can_gather(case)


def _can_gather(case: OpCase) -> str | None:
    if not case.shapes["S"]:
        return "every visible key is used"
    if not case.shapes["L"]:
        return "the adapter of kv_b has dropout, so keys are no plain map of the latent"
    return None


def _tile_bytes(case: OpCase) -> int:
    """Two score buffers of float32, or float64."""
    wide = 8 if case.dtype is torch.float64 else 4
    return 2 * wide * max(QUERY_BLOCK * case.shapes["T"], BUFFER_ELEMENTS)


def _gather_bytes(case: OpCase) -> int:
    """The rows [T, L + P], their gradient, and the gathered ones."""
    wide = 8 if case.dtype is torch.float64 else 4
    row = case.shapes["L"] + case.shapes["P"]
    return wide * (2 * case.shapes["T"] * row + max(GATHER_ELEMENTS, case.shapes["S"] * row))


ATTENTION: Operator[..., Tensor] = Operator(
    "attention", _attention_case,
    (
        Implementation("triton", _triton, _triton_supports, slower=tiles_are_faster),
        Implementation("gather", _gather, _can_gather, _gather_bytes, slower=tiles_are_faster),
        Implementation("native", partial(_tiles, use_native=True), native.supports, _tile_bytes),
        Implementation("tiles", partial(_tiles, use_native=False), workspace_bytes=_tile_bytes),
        Implementation("reference", _reference),
    ),
    {"T": 32768, "M": 16384, "H": 64, "K": 192, "V": 128, "L": 512, "P": 64, "S": 2048},
)


def _index_case(
    q: Tensor, pooled: Tensor, weights: Tensor, rule: PoolRule, borders: PackBorders
) -> OpCase:
    check_index(q, pooled, weights, rule, borders)
    total, heads, wide = q.shape
    return OpCase(q.device.type, q.dtype, {"T": total, "H": heads, "K": wide, "S": rule.width})


def _index_bytes(case: OpCase) -> int:
    """Scores and products of a block, twice again for the choice."""
    return 16 * QUERY_BLOCK * case.shapes["T"]


INDEXER: Operator[..., Selection] = Operator(
    "indexer", _index_case,
    (
        Implementation("native", partial(select, use_native=True), native.supports, _index_bytes),
        Implementation("blocks", partial(select, use_native=False), workspace_bytes=_index_bytes),
        Implementation("reference", select_reference),
    ),
    {"T": 32768, "H": 64, "K": 128, "S": 2048},
)
