"""KDA by the compiled CPU kernel: chunks of 32 tokens, one head of one sequence at a time.

Exact for any gate without a bound on it: decays are products of exp(g), never exp of a sum. Memory
beside inputs and outputs is a buffer per thread and, for training, one state per 256 tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.ops.checks import require
from trimtab.ops.kda.check import check_kda
from trimtab.ops.kda.pair import CHUNK, Gradients, Segments, define_pair, run_pair
from trimtab.ops.native.call import address
from trimtab.ops.native.library import library, unavailable
from trimtab.ops.precision import island_dtype
from trimtab.ops.registry import OpCase

_SEGMENT_CHUNKS = 8
_SEGMENTS = Segments(_SEGMENT_CHUNKS * CHUNK)
_DTYPES = (torch.float32, torch.bfloat16)


def kda_native(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, gate_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule in float32; arguments and results as `kda_chunk`.

    Inputs are float32 or bfloat16, each for itself; bfloat16 is widened chunk by chunk. States
    are float32. `gate_bound` changes nothing.

    Raises:
        OperatorError: TT111, an argument is wrong.
        RunError: TT605, the kernel is not available here.
    """
    check_kda(q, k, v, g, beta, initial_state, cu_seqlens)
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        require(x.dtype in _DTYPES, f"kda.{name}", "must be float32 or bfloat16 here", x.dtype)
    return run_pair(
        _KERNEL, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, gate_bound
    )


def supports(case: OpCase) -> str | None:
    """Why the kernel cannot run a case, or None."""
    if case.device != "cpu":
        return f"runs on cpu, not on {case.device}"
    if case.dtype not in _DTYPES:
        return f"computes in float32, not {str(case.dtype).removeprefix('torch.')}"
    return unavailable("kda")


def workspace_bytes(case: OpCase) -> int:
    """Buffers of all threads in the backward pass, the larger one, and the states kept for it."""
    shapes = case.shapes
    key, value = shapes["K"], shapes["V"]
    states = _SEGMENTS.rows(shapes["B"] * shapes["T"], shapes["B"]) * shapes["H"] * key * value
    return 4 * (torch.get_num_threads() * _buffer_floats(key, value) + states)


def _buffer_floats(key: int, value: int) -> int:
    """Size of one thread's backward buffer; the kernel pads K and V to multiples of 16."""
    key, value = _padded(key), _padded(value)
    chunk = 15 * CHUNK * key + 20 * key + CHUNK + CHUNK**2
    kept = key * value + 2 * CHUNK * value + 2 * CHUNK**2
    own = 3 * CHUNK * value + 2 * CHUNK**2 + 2 * key * value + 4 * CHUNK * key + key + CHUNK
    gaps = (33 + 5 * _SEGMENT_CHUNKS) * 48  # between its arrays
    return chunk + _SEGMENT_CHUNKS * kept + own + gaps


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor, save: bool, gate_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = cu_seqlens.shape[0] - 1
    heads, key, value = k.shape[1], k.shape[2], v.shape[2]
    out = torch.empty_like(v)
    final = g.new_empty(sequences, heads, key, value, dtype=island_dtype(g))
    states = _SEGMENTS.empty(g, v, sequences, save)
    threads = torch.get_num_threads()
    kernel = library("kda")
    floats = _floats(kernel, 0, key, value)
    work = final.new_empty(threads * floats)
    kernel.kda_forward(
        address(cu_seqlens), sequences, heads, key, value, ctypes.c_float(scale),
        *_tensors([q, k, v, g, beta, out]), address(initial_state), address(states if save else None),
        address(final), threads, address(work), ctypes.c_int64(floats),
    )
    return out, final, states


def _backward(
    dout: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, states: Tensor, cu_seqlens: Tensor, gate_bound: float | None,
) -> Gradients:
    heads, key, value = k.shape[1], k.shape[2], v.shape[2]
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dinitial = torch.empty_like(dfinal)
    threads = torch.get_num_threads()
    kernel = library("kda")
    floats = _floats(kernel, 1, key, value)
    work = dfinal.new_empty(threads * floats)
    kernel.kda_backward(
        address(cu_seqlens), cu_seqlens.shape[0] - 1, heads, key, value, ctypes.c_float(scale),
        *_tensors([q, k, v, g, beta, dout, dq, dk, dv, dg, dbeta]), address(states), address(dfinal),
        address(dinitial), threads, address(work), ctypes.c_int64(floats),
    )
    return dq, dk, dv, dg, dbeta, dinitial


def _floats(kernel: ctypes.CDLL, backward: int, key: int, value: int) -> int:
    count = kernel.kda_floats
    count.restype = ctypes.c_int64
    return int(count(backward, key, value))


def _tensors(tensors: Sequence[Tensor]) -> tuple[object, object]:
    """Addresses and, for each, whether it is bfloat16."""
    addresses = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
    flags = (ctypes.c_int * len(tensors))(*(x.dtype is torch.bfloat16 for x in tensors))
    return addresses, flags


_KERNEL = define_pair("kda", _forward, _backward, _SEGMENTS)
