"""When gathered latents beat tiles: a model of both, from times measured on a CPU.

Per query, forward and backward, in microseconds of one core:

    tiles:  M H (7 K / 2 + 3 V) 2 / RATE + M H PASS       every visible key, selected or not
    gather: S (L + P) FETCH + S H (4 (L + P) + 3 L) 2 / GATHER_RATE

with M visible and S selected keys. The constants are those of `benchmarks/ops/attention.py`; what
matters is their ratio, which is alike wherever a matrix product is limited by arithmetic.
"""

from __future__ import annotations

from trimtab.ops.registry import OpCase

# Multiply-adds per microsecond of long products in tiles.
TILE_RATE = 30_000.0
# Microseconds per score that the passes of softmax and its gradient take.
TILE_PASS = 1.5e-3
# Multiply-adds per microsecond of products of one query's heads with its rows.
GATHER_RATE = 25_000.0
# Microseconds per element of a gathered row, and of its gradient put back.
GATHER_FETCH = 2.0e-3


def tile_us(m: int, h: int, k: int, v: int) -> float:
    """Microseconds per query of tiles, forward and backward.

    Args:
        m: visible keys of an average query.
        h: heads.
        k: width of a query.
        v: width of a value.
    """
    return m * h * ((4 * k + 3 * v) / TILE_RATE + TILE_PASS)


def gather_us(s: int, h: int, rank: int, shared: int) -> float:
    """Microseconds per query of gathered latents, forward and backward.

    Args:
        s: selected keys of an average query.
        h: heads.
        rank: width of a latent.
        shared: width of the shared key part.
    """
    row = rank + shared
    return s * (row * GATHER_FETCH + h * (4 * row + 3 * rank) / GATHER_RATE)


def tiles_are_faster(case: OpCase) -> str | None:
    """Why tiles are the better choice for a case, or None."""
    n = case.shapes
    tiles = tile_us(n["M"], n["H"], n["K"], n["V"])
    gather = gather_us(min(n["S"], n["M"]), n["H"], n["L"], n["P"])
    if gather < tiles:
        return None
    return f"tiles are faster: {tiles:.0f} against {gather:.0f} us per query by the cost model"
