"""Shares: what one rank holds of a model, read from a checkpoint of any layout.

Knows: which tensors belong to a rank, reading them into their final memory. Does not know: process
groups, modules.

A rank reads exactly its ranges: of a released checkpoint the experts of its group, of a converted
one of the same layout its own files from beginning to end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.checkpoint.codec import TORCH_DTYPES
from trimtab.checkpoint.layout import FileKey, Layout
from trimtab.checkpoint.moves import ByteMove, HeldMove, PlannedTensor
from trimtab.checkpoint.planned import BaseDtype, plan_tensors, written_arch
from trimtab.checkpoint.source import Source
from trimtab.checkpoint.stream import THREAD_BYTES
from trimtab.errors import CheckpointError
from trimtab.units import format_bytes

_SPAN_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's pipeline stage, expert group and tensor shard."""

    pp: int = 0
    ep: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class ShareCost:
    """What reading a share takes.

    Args:
        held: bytes of the tensors.
        read: bytes that are read for them.
        total: bytes of the whole checkpoint.
    """

    held: int
    read: int
    total: int

    @property
    def extra(self) -> int:
        """Bytes read and thrown away."""
        return self.read - self.held

    def sentence(self, ranks: int) -> str:
        """Extra bytes in words, and after how many loads a conversion has paid for itself.

        Args:
            ranks: ranks that load at the same time from the same disk.
        """
        if not self.extra:
            return f"each rank reads {format_bytes(self.read)}, nothing in vain"
        loads = -(-2 * self.total // (self.extra * ranks))
        return (
            f"each rank reads {format_bytes(self.read)}, {format_bytes(self.extra)} of it in vain; "
            f"`trimtab convert` pays after {loads} loads"
        )


def share_tensors(
    source: Source, layout: Layout, at: Coordinates, base_dtype: BaseDtype = "native"
) -> list[PlannedTensor]:
    """The tensors of one rank, in the order in which they are read.

    Raises:
        CheckpointError: TT313 if there is no such rank; see `plan_conversion`.
    """
    degrees = layout.degrees
    for name in ("pp", "ep", "tp"):
        if not 0 <= getattr(at, name) < getattr(degrees, name):
            raise CheckpointError("TT313", f"rank: {name}", f"must be below {getattr(degrees, name)}",
                                  value=getattr(at, name))
    arch, written, _ = written_arch(source, base_dtype)
    planned = plan_tensors(source, arch, written, layout)
    if layout.is_logical:
        return [tensor for key in sorted(planned) for tensor in planned[key]]
    keys = [FileKey(at.pp, "shared"), FileKey(at.pp, "tp", at.tp), FileKey(at.pp, "ep", at.ep)]
    mine = [tensor for key in keys for tensor in planned.get(key, [])]
    if arch.tie_word_embeddings and 0 < at.pp == degrees.pp - 1:
        first = [FileKey(0, "shared"), FileKey(0, "tp", at.tp)]
        tables = [tensor for key in first for tensor in planned.get(key, [])]
        mine += [tensor for tensor in tables if tensor.name.startswith("embed.weight")]
    return mine


def share_cost(source: Source, layout: Layout, at: Coordinates) -> ShareCost:
    """What a rank reads when it loads straight from a checkpoint, without reading it."""
    mine = share_tensors(source, layout, at)
    held = sum(tensor.num_bytes for tensor in mine)
    read = sum(
        tensor.source_bytes if isinstance(tensor, ByteMove | HeldMove) else tensor.num_bytes
        for tensor in mine
    )
    return ShareCost(held, read, sum(entry.num_bytes for entry in source.entries().values()))


def load_share(
    source: Source, layout: Layout, at: Coordinates, *, base_dtype: BaseDtype = "native",
    memory: int = 2**28, workers: int = 4, progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """The tensors of one rank, by the names of the inventory.

    Args:
        source: a checkpoint, released or converted to any layout.
        layout: the run's.
        at: the rank.
        base_dtype: see `plan_conversion`.
        memory: bytes beside the final tensors.
        workers: threads that read, fewer where the memory does not do for so many.
        progress: called with bytes done and in all.

    Returns:
        Tensors on the CPU; packed matrices as `NAME.packed` and `NAME.scale`.

    Raises:
        CheckpointError: TT301 or TT310 if a tensor cannot be read or holds bad numbers.
    """
    mine = share_tensors(source, layout, at, base_dtype)
    found = {
        tensor.name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for tensor in mine
    }
    spans = [
        (tensor, begin) for tensor in mine for begin in range(0, tensor.num_bytes, _SPAN_BYTES)
    ]
    total, done = sum(tensor.num_bytes for tensor in mine), 0

    def fill(span: tuple[PlannedTensor, int]) -> int:
        tensor, begin = span
        end = min(begin + _SPAN_BYTES, tensor.num_bytes)
        memory_of = found[tensor.name].reshape(-1).view(torch.uint8).numpy().data
        tensor.fill(begin, memory_of[begin:end])
        return end - begin

    with ThreadPoolExecutor(max(1, min(workers, memory // THREAD_BYTES))) as pool:
        for count in pool.map(fill, spans):
            done += count
            if progress is not None:
                progress(done, total)
    return found
