"""Measure collectives among processes of this machine.

Knows: process groups. Does not know: models, cluster documents.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from trimtab.errors import RunError
from trimtab.parallel.measure import best_seconds, this_device

Kind = Literal["all_reduce", "all_gather", "all_to_all"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all")
_RUNS = 10
_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True)
class CollectiveSpeed:
    """One collective in one group of ranks.

    Args:
        kind: of the collective.
        ranks: of the group.
        latency: seconds with a few bytes.
        bandwidth: bytes per second that a rank sends.
    """

    kind: Kind
    ranks: int
    latency: float
    bandwidth: float


def measure_collectives(ranks: int, size: int = 2**24) -> list[CollectiveSpeed]:
    """Time collectives in groups of 2, 4, ... and of all ranks, one process each.

    Args:
        ranks: processes, each with a device of its own unless there is only the CPU.
        size: bytes that a rank holds.

    Raises:
        RunError: TT606, a process failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        port, out = _free_port(), Path(directory) / "found.json"
        workers = [
            context.Process(target=_rank, args=(rank, ranks, port, size, str(out)), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        _join(workers)
        return [CollectiveSpeed(**row) for row in json.loads(out.read_text(encoding="utf-8"))]


def _join(workers: Sequence[BaseProcess]) -> None:
    """Wait for all; where one fails, end the others, which would wait for it."""
    running = dict(enumerate(workers))
    while running:
        wait([worker.sentinel for worker in running.values()])
        for rank, worker in list(running.items()):
            code = worker.exitcode
            if code is None:
                continue
            del running[rank]
            if code:
                for other in running.values():
                    other.terminate()
                raise RunError(
                    "TT606", f"rank {rank}", "ended early while collectives were measured",
                    value=f"exit code {code}", hint="its own words stand above",
                )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, ranks: int, port: int, size: int, out: str) -> None:
    device = this_device()
    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    rows = list(_all(rank, ranks, size, device))
    if rank == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _all(rank: int, ranks: int, size: int, device: torch.device) -> Iterator[dict[str, object]]:
    sizes = [n for n in (2**i for i in range(1, ranks.bit_length())) if n < ranks]
    for count in (*sizes, ranks):
        # Every rank must take part in the making of a group, also those outside it.
        group = dist.new_group(list(range(count)))
        if rank >= count:
            continue
        assert group is not None and not isinstance(group, int), "this rank is in it"
        for kind in KINDS:
            latency, seconds = (_seconds(kind, group, count, n, device) for n in (64, size))
            moved = size * (count - 1) / count * (2 if kind == "all_reduce" else 1)
            yield {"kind": kind, "ranks": count, "latency": latency,
                   "bandwidth": moved / max(1e-9, seconds - latency)}


def _seconds(
    kind: Kind, group: dist.ProcessGroup, ranks: int, size: int, device: torch.device
) -> float:
    """Seconds of one collective; a rank holds `size` bytes at its end."""
    part = max(1, size // 4 // ranks)
    mine, whole = torch.ones(part, device=device), torch.ones(ranks * part, device=device)
    other = torch.empty_like(whole)
    run: Callable[[], object]
    if kind == "all_gather":
        run = partial(dist.all_gather, list(whole.chunk(ranks)), mine, group=group)
    elif kind == "all_reduce":
        run = partial(dist.all_reduce, whole, op=dist.ReduceOp.MAX, group=group)
    else:
        run = partial(dist.all_to_all_single, other, whole, group=group)
    dist.barrier(group=group)
    # Every rank must take part in every run.
    return best_seconds(run, device, _RUNS)
