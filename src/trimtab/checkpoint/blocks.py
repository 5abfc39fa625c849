"""Filling one parameter from its stored tensors block by block.

Knows: how many rows fit the memory. Does not know: models, which parameters there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.codec import TORCH_DTYPES, Part, form_of, packed_kind, to_tensor
from trimtab.checkpoint.moves import check_finite
from trimtab.checkpoint.source import Source
from trimtab.ops.packed import DECODE

# A block as read, and as float32 where it is decoded.
BLOCK_BYTES = 32 * 2**20


def read_part_into(target: Tensor, part: Part, source: Source) -> None:
    """Fill a contiguous tensor of the shape of a part, cast to its dtype.

    Args:
        target: where the part goes, on any device.
        part: what to read.
        source: the checkpoint.

    Raises:
        CheckpointError: TT301 if a file ends early, TT310 for NaN, infinity or a NaN scale.
    """
    kinds = {packed_kind(stored): stored for stored in part.stored}
    if "packed" in kinds:
        _decode(target, kinds["packed"], kinds["scale"], source)
        return
    (stored,) = part.stored
    flat, dtype = target.reshape(-1), source.entries()[stored.name].dtype
    item = TORCH_DTYPES[dtype].itemsize
    step = BLOCK_BYTES // item
    for begin in range(0, part.numel, step):
        count = min(step, part.numel - begin)
        raw = _read(stored, dtype, begin * item, count * item, source)
        flat[begin : begin + count].copy_(to_tensor(raw, dtype, (count,)))


def _decode(target: Tensor, values: StoredTensor, scale: StoredTensor, source: Source) -> None:
    """Rows of a packed matrix, a whole number of blocks at a time."""
    form = form_of(scale)
    rows, columns = target.shape
    per_block = form.block[0]
    step = max(1, BLOCK_BYTES // (4 * columns * per_block)) * per_block
    exact = torch.bfloat16 if form.kind == "mxfp4" else torch.float32
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        packed = _rows(values, range(begin, end), source).view(torch.uint8)
        factors = _rows(scale, range(begin // per_block, -(-end // per_block)), source)
        out = torch.empty((end - begin, columns), dtype=exact)
        target[begin:end].copy_(DECODE(packed, factors, form, out))


def _rows(stored: StoredTensor, rows: range, source: Source) -> Tensor:
    pitch = stored.num_bytes // stored.shape[0]
    raw = _read(stored, stored.dtype, rows.start * pitch, len(rows) * pitch, source)
    return to_tensor(raw, stored.dtype, (len(rows), *stored.shape[1:]))


def _read(
    stored: StoredTensor, dtype: str, begin: int, count: int, source: Source
) -> bytearray:
    raw = source.read(stored.name, begin, count)
    file = source.entries()[stored.name].file
    with memoryview(raw) as view:
        check_finite(view, begin, dtype, stored.transform,
                     lambda: f"{source.where}/{file}: {stored.name}", stored.shape)
    return raw
