"""Selection: the keys that each query of a pack attends to, as bits or as positions.

Bits cost the visible pairs / 8 bytes, positions 4 bytes per slot; the smaller form is kept. With
2048 keys a query, bits are smaller up to 131072 tokens in one sequence.

Bits are laid out block by block (`PackBorders.byte_starts`); bit j of byte i of a row stands for
the key 8i + j after the block's first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.ops.attention.packs import (
    QUERY_BLOCK,
    PackBorders,
    blocks,
    row_bytes,
)
from trimtab.ops.checks import check_shape, require, values_readable

# Multiplying eight 0/1 bytes by this collects them, first byte lowest, in the highest byte.
_COLLECT = 0x0102040810204080


@dataclass(frozen=True, slots=True)
class Selection:
    """Which keys each query of a pack attends to; all of them visible to it.

    Args:
        borders: of the pack.
        width: S, most keys that one query keeps.
        bits: uint8, packed masks; None where positions are kept.
        positions: [T, S] int32, ascending, -1 in unused slots; None where bits are kept.
    """

    borders: PackBorders
    width: int
    bits: Tensor | None
    positions: Tensor | None

    @classmethod
    def of(cls, borders: PackBorders, width: int, stored: Tensor) -> Selection:
        """From the tensor of whichever form `kept_as_bits` says."""
        as_bits = stored.dtype is torch.uint8
        return cls(borders, width, stored if as_bits else None, None if as_bits else stored)

    @classmethod
    def from_positions(cls, positions: Tensor, borders: PackBorders) -> Selection:
        """From a list of keys for each query.

        Args:
            positions: [T, S] int32 or int64 in any order, negative for unused slots.
            borders: of the pack.

        Raises:
            OperatorError: TT111, a wrong shape or dtype, or a key that its query may not see.
        """
        check_shape("positions", positions, "T S", {"T": borders.total})
        whole = positions.dtype in (torch.int32, torch.int64)
        require(whole, "positions", "must be int32 or int64", positions.dtype)
        own = torch.arange(borders.total, device=positions.device).unsqueeze(1)
        wrong = (positions >= 0) & ((positions > own) | (positions < borders.starts.unsqueeze(1)))
        if values_readable(positions) and bool(wrong.any()):
            t, slot = wrong.nonzero()[0].tolist()
            rule = f"must be a key of its sequence up to itself, {int(borders.starts[t])} to {t}"
            require(False, f"positions[{t}, {slot}]", rule, int(positions[t, slot]))
        stored = new_selection(borders, positions.shape[1], positions.device)
        listed = cls(borders, positions.shape[1], None, positions)
        for queries, keys in blocks(borders):
            write_block(stored, borders, listed.mask(queries, keys), queries, keys)
        return cls.of(borders, positions.shape[1], stored)

    @property
    def stored(self) -> Tensor:
        """The tensor of the form that is kept."""
        found = self.positions if self.bits is None else self.bits
        assert found is not None, "one form is always kept"
        return found

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return self.stored.nbytes

    def mask(self, queries: slice, keys: slice) -> Tensor:
        """[queries, keys] bool of one block of `blocks(borders)`."""
        if self.bits is not None:
            return unpack_bits(self.block_bits(queries, keys), keys.stop - keys.start)
        assert self.positions is not None, "one form is always kept"
        chosen = self.positions[queries]
        width = keys.stop - keys.start
        column = torch.where(chosen < 0, width, chosen.long() - keys.start)  # one more for unused slots
        mask = torch.zeros(chosen.shape[0], width + 1, dtype=torch.bool, device=chosen.device)
        return mask.scatter_(1, column, True)[:, :width]

    def block_bits(self, queries: slice, keys: slice) -> Tensor:
        """[queries, bytes] uint8, a view of one block's bits."""
        assert self.bits is not None, "asked only of bits"
        begin = self.borders.byte_starts[queries.start // QUERY_BLOCK]
        shape = (queries.stop - queries.start, row_bytes(keys.stop - keys.start))
        return self.bits[begin : begin + shape[0] * shape[1]].view(shape)

    def block_positions(self, queries: slice, keys: slice) -> Tensor:
        """[queries, S] int32 of one block, ascending, -1 in unused slots at the end."""
        if self.positions is not None:
            return self.positions[queries]
        out = self.stored.new_full((queries.stop - queries.start, self.width), -1, dtype=torch.int32)
        _write_positions(out, self.mask(queries, keys), keys.start)
        return out

    def all_positions(self) -> Tensor:
        """[T, S] int32 of the whole pack, as in `block_positions`."""
        parts = [self.block_positions(*block) for block in blocks(self.borders)]
        return torch.cat(parts) if parts else self.stored.new_empty(0, self.width, dtype=torch.int32)


def kept_as_bits(borders: PackBorders, width: int) -> bool:
    """Whether bits are the smaller form for a selection of up to `width` keys a query."""
    return borders.byte_starts[-1] <= 4 * borders.total * width


def new_selection(borders: PackBorders, width: int, device: torch.device) -> Tensor:
    """The empty tensor of the smaller form, to be filled block by block."""
    if kept_as_bits(borders, width):
        return torch.zeros(borders.byte_starts[-1], dtype=torch.uint8, device=device)
    return torch.full((borders.total, width), -1, dtype=torch.int32, device=device)


def write_block(
    stored: Tensor, borders: PackBorders, mask: Tensor, queries: slice, keys: slice
) -> None:
    """Write one block's mask into a tensor of `new_selection`.

    Args:
        stored: changed in place.
        borders: of the pack.
        mask: [queries, keys] bool, at most S per row.
        queries: of the block.
        keys: of the block.
    """
    if stored.dtype is torch.uint8:
        write_bits(stored, borders, pack_bits(mask), queries)
    else:
        _write_positions(stored[queries], mask, keys.start)


def write_bits(stored: Tensor, borders: PackBorders, bits: Tensor, queries: slice) -> None:
    """Write one block's packed mask [q, bytes] into a selection that is kept as bits."""
    begin = borders.byte_starts[queries.start // QUERY_BLOCK]
    stored[begin : begin + bits.numel()] = bits.flatten()


def _write_positions(out: Tensor, mask: Tensor, first: int) -> None:
    row, column = mask.nonzero(as_tuple=True)
    slot = (torch.cumsum(mask, 1, dtype=torch.int32) - 1)[row, column]
    out[row, slot.long()] = (column + first).to(torch.int32)


def pack_bits(mask: Tensor) -> Tensor:
    """[q, s] bool -> [q, bytes] uint8, first column lowest.

    >>> pack_bits(torch.tensor([[True, False, True]])).tolist()
    [[5]]
    """
    short = -mask.shape[1] % 8
    eights = torch.nn.functional.pad(mask, (0, short)).contiguous().view(torch.int64)
    return ((eights * _COLLECT) >> 56 & 255).to(torch.uint8)


def unpack_bits(bits: Tensor, width: int) -> Tensor:
    """[q, bytes] uint8 -> [q, width] bool."""
    byte = torch.arange(256, device=bits.device).unsqueeze(1)
    table = (byte >> torch.arange(8, device=bits.device) & 1).to(torch.uint8).view(torch.int64)
    return table[:, 0][bits.long()].view(torch.bool)[:, :width]
