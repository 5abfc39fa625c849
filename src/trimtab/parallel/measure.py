"""Measure one device: matrix products, attention, memory, launches.

Knows: how to time them. Does not know: cluster documents, other ranks.

Every figure is the best of several runs, since a plan asks what the machine can do.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.config.cluster_document import Shares

_RUNS, _MOST_RUNS, _SECONDS = 5, 200, 0.5
_LAUNCHES = 200
_HEADS, _HEAD_DIM = 4, 128
_EXPERTS = 16
# More than any cache holds.
_CACHE = 2**28


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one device reaches.

    Args:
        name: of the device.
        dtype: that the products were computed in.
        memory: bytes of device memory, of the host where the device is the CPU.
        flops: per second of the best product.
        gemm: share of it that a product reaches, by its rows.
        grouped: share that products over several experts reach, by rows per expert.
        attention: share that causal softmax attention reaches.
        memory_bandwidth: bytes per second of a copy, read and written.
        elementwise: share of it that a gated product of two tensors reaches.
        kernel_seconds: between a small kernel and the next on the device.
        host_seconds: for the host to launch one.
        host_link: bytes per second from host to device memory; None on a CPU.
    """

    name: str
    dtype: str
    memory: int
    flops: float
    gemm: Shares
    grouped: Shares
    attention: float
    memory_bandwidth: float
    elementwise: float
    kernel_seconds: float
    host_seconds: float
    host_link: float | None


def this_device() -> torch.device:
    """The accelerator of this machine, or its CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def measure_device(size: int | None = None) -> DeviceSpeed:
    """Measure the first device of this machine.

    Args:
        size: rows and columns of the matrices; by default what keeps the device busy for long
            enough to be timed.
    """
    device = this_device()
    is_cpu = device.type == "cpu"
    size = size or (2048 if is_cpu else 8192)
    dtype = torch.float32 if is_cpu else torch.bfloat16
    x = torch.randn(size, size, device=device, dtype=dtype)
    w = torch.randn(size, size, device=device, dtype=dtype)
    with torch.inference_mode():
        dense = _by_rows(size, lambda rows: _dense(x, w, rows, device))
        grouped = _by_rows(size // _EXPERTS, lambda rows: _grouped(x, w, rows, device))
        flops = max(rate for _, rate in dense)
        copied, gated = _bandwidths(size, device)
        launched, ran = _launches(device)
        return DeviceSpeed(
            name=_name(device), dtype=str(dtype).removeprefix("torch."), memory=_memory(device),
            flops=flops, gemm=_shares(dense, flops), grouped=_shares(grouped, flops),
            attention=min(1.0, _attention(size, device, dtype) / flops),
            memory_bandwidth=copied, elementwise=min(1.0, gated / copied),
            kernel_seconds=ran, host_seconds=launched, host_link=_host_link(size, device),
        )


def best_seconds(
    run: Callable[[], object], device: torch.device, runs: int | None = None
) -> float:
    """Fewest seconds of several runs, after one that is not counted; short ones run more often.

    Args:
        run: what is timed.
        device: that is waited for.
        runs: how many, where several processes must agree on it.
    """
    best, done, total = float("inf"), 0, 0.0
    least, most = (runs, runs) if runs else (_RUNS, _MOST_RUNS)
    run()
    wait(device)
    while done < least or (total < _SECONDS and done < most):
        started = time.perf_counter()
        run()
        wait(device)
        taken = time.perf_counter() - started
        best, done, total = min(best, taken), done + 1, total + taken
    return best


def wait(device: torch.device) -> None:
    """Wait until a device has done all that was launched."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name())


def _memory(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _, total = torch.get_device_module(device).mem_get_info()
    return int(total)


def _by_rows(most: int, rate: Callable[[int], float]) -> list[tuple[int, float]]:
    """FLOPs per second for 1, 4, 16, ... and `most` rows."""
    counts = sorted({*(4**n for n in range(most.bit_length()) if 4**n < most), max(1, most)})
    return [(rows, rate(rows)) for rows in counts]


def _shares(rates: list[tuple[int, float]], peak: float) -> Shares:
    return tuple((rows, min(1.0, rate / peak)) for rows, rate in rates)


def _dense(x: Tensor, w: Tensor, rows: int, device: torch.device) -> float:
    """FLOPs per second of a product of the first rows, with weights that no cache holds."""
    part = x[:rows]
    copies = min(_RUNS + 1, max(1, _CACHE // (w.numel() * w.element_size())))
    weights = itertools.cycle([w, *(w.clone() for _ in range(copies - 1))])
    return 2 * rows * w.numel() / best_seconds(lambda: part @ next(weights), device)


def _grouped(x: Tensor, w: Tensor, rows: int, device: torch.device) -> float:
    """FLOPs per second of one product per expert, each of so many rows and weights of its own."""
    size = x.shape[0]
    width = max(1, size // 4)
    parts = [x[i * rows:(i + 1) * rows] for i in range(_EXPERTS)]
    experts = torch.stack([w[:, :width]] * _EXPERTS)

    def run() -> None:
        for part, expert in zip(parts, experts, strict=True):
            part @ expert

    return 2 * _EXPERTS * rows * size * width / best_seconds(run, device)


def _attention(tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of causal attention, of which half are needed."""
    q, k, v = (torch.randn(1, _HEADS, tokens, _HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    seconds = best_seconds(
        lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True), device
    )
    return 2 * _HEADS * tokens**2 * _HEAD_DIM / seconds


def _bandwidths(size: int, device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy and of a gated product, on tensors that no cache holds."""
    a, b = (torch.randn(16 * size * size, device=device) for _ in range(2))
    out = torch.empty_like(a)
    num_bytes = a.numel() * a.element_size()
    copied = 2 * num_bytes / best_seconds(lambda: out.copy_(a), device)
    gated = 3 * num_bytes / best_seconds(lambda: torch.mul(a, b, out=out), device)
    return copied, gated


def _launches(device: torch.device) -> tuple[float, float]:
    """Seconds of the host per launch, and of host and device together per small kernel."""
    small = torch.zeros(16, device=device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1)

    both = best_seconds(run, device) / _LAUNCHES
    if device.type == "cpu":
        # The host is the device: a kernel's cost counts once.
        return 0.0, both
    times = []
    for _ in range(_RUNS):
        wait(device)
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times) / _LAUNCHES, both


def _host_link(size: int, device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    host = torch.randn(size, size).pin_memory()
    there = torch.empty_like(host, device=device)
    return host.numel() * host.element_size() / best_seconds(lambda: there.copy_(host), device)
