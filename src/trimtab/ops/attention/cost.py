"""When gathered latents beat tiles: a model of both, with rates measured on a CPU.

Microseconds of one core per query, forward and backward, for a frozen kv_b:

    tiles:  M H ((4 K + 3 V) / TILE_RATE + TILE_PASS)
    gather: S (L + P) FETCH + H (S (4 (L + P) + 3 L) + L (3 (K - P) + 2 V)) / GATHER_RATE

with M visible and S selected keys: tiles multiply every visible key, selected or not, while
gathered latents are wider than keys and must be fetched, and kv_b is applied to every query. The
rates are float32 on one Zen 3 core (`benchmarks.ops attention` shows both sides next to what is
said here); their ratio decides, and that is alike wherever arithmetic limits long products.
"""

from __future__ import annotations

from trimtab.ops.registry import OpCase

# Multiply-adds per microsecond of the products of tiles: 70 GFLOP/s.
TILE_RATE = 35_000.0
# Microseconds per score in the passes of softmax and of its gradient.
TILE_PASS = 2.5e-3
# Multiply-adds per microsecond of the products of one query's heads with its rows.
GATHER_RATE = 33_000.0
# Microseconds per element of a row that is fetched, and whose gradient is put back.
FETCH = 1.7e-3


def tile_us(m: int, h: int, k: int, v: int) -> float:
    """Microseconds per query of tiles, forward and backward.

    Args:
        m: visible keys of an average query.
        h: heads.
        k: width of a query.
        v: width of a value.
    """
    return m * h * ((4 * k + 3 * v) / TILE_RATE + TILE_PASS)


def gather_us(s: int, h: int, k: int, v: int, rank: int, shared: int) -> float:
    """Microseconds per query of gathered latents, forward and backward.

    Args:
        s: selected keys of an average query.
        h: heads.
        k: width of a query.
        v: width of a value.
        rank: width of a latent.
        shared: width of the shared key part.
    """
    row = rank + shared
    absorb = rank * (3 * (k - shared) + 2 * v)
    return s * row * FETCH + h * (s * (4 * row + 3 * rank) + absorb) / GATHER_RATE


def tiles_are_faster(case: OpCase) -> str | None:
    """Why tiles are the better choice for a case, or None."""
    n = case.shapes
    tiles = tile_us(n["M"], n["H"], n["K"], n["V"])
    gather = gather_us(min(n["S"], n["M"]), n["H"], n["K"], n["V"], n["L"], n["P"])
    if gather < tiles:
        return None
    return f"tiles are faster: {tiles:.0f} against {gather:.0f} us per query by the cost model"
