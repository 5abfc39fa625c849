"""Masks of one block of queries, and the passes over its scores that need them.

Key ranges of which a block selects nothing are left out before the scores exist. Of the rest,
PyTorch adds 0 or -inf; the native kernels read the packed bits, or one range per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimtab.ops.attention.native import RowMasks
from trimtab.ops.attention.packs import QUERY_BLOCK, PackBorders, row_bytes, visible_mask
from trimtab.ops.attention.selection import Selection, pack_bits

# Keys that are left out together; whole bytes of packed bits.
KEY_RUN = 256


@dataclass(frozen=True, slots=True)
class KeyRuns:
    """Ranges of keys that a block uses, and their places in its score buffer.

    Args:
        runs: positions in the pack, ascending.
    """

    runs: tuple[slice, ...]

    @property
    def width(self) -> int:
        """Keys in all ranges."""
        return sum(run.stop - run.start for run in self.runs)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Each range with its columns in the buffer."""
        place = 0
        for run in self.runs:
            end = place + run.stop - run.start
            yield run, slice(place, end)
            place = end


class TileMask(Protocol):
    """The passes over the scores of one block of queries; they work in place."""

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [h, q, s] to exp(s - max), 0 where masked.

        Returns:
            [h, q] log-sum-exp, 0 for a row that may use nothing, and [h, q] the factor that makes
            the row a distribution, 0 for such a row.
        """

    def probabilities(self, scores: Tensor, lse: Tensor) -> None:
        """Scores [h, q, s] to probabilities, given the log-sum-exp [h, q]."""

    def score_gradient(self, gradient: Tensor, p: Tensor, delta: Tensor) -> None:
        """Gradient of the probabilities [h, q, s] to that of the scores; delta [h, q] is sum p dp."""


@dataclass(frozen=True, slots=True)
class BiasMask:
    """Masks in PyTorch.

    Args:
        bias: [q, n], 0 or -inf, of the last n columns; the columns before are free.
    """

    bias: Tensor

    def _masked(self, scores: Tensor) -> Tensor:
        scores[..., scores.shape[-1] - self.bias.shape[-1] :] += self.bias
        return scores

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """See `TileMask`."""
        top = self._masked(scores).amax(-1, keepdim=True)
        top.masked_fill_(top == float("-inf"), 0.0)
        total = scores.sub_(top).exp_().sum(-1)
        empty = total == 0
        lse = (top.squeeze(-1) + total.log()).masked_fill_(empty, 0.0)
        return lse, total.reciprocal_().masked_fill_(empty, 0.0)

    def probabilities(self, scores: Tensor, lse: Tensor) -> None:
        """See `TileMask`."""
        self._masked(scores).sub_(lse.unsqueeze(-1)).exp_()

    def score_gradient(self, gradient: Tensor, p: Tensor, delta: Tensor) -> None:
        """See `TileMask`."""
        gradient.sub_(delta.unsqueeze(-1)).mul_(p)


def block_mask(
    borders: PackBorders, selection: Selection | None, queries: slice, keys: slice,
    dtype: torch.dtype, native: bool,
) -> tuple[KeyRuns, TileMask]:
    """Key ranges and mask of one block.

    Args:
        borders: of the pack.
        selection: None for all visible keys.
        queries: of the block.
        keys: that the block sees.
        dtype: of the scores.
        native: whether compiled kernels do the passes.
    """
    if selection is None:
        return KeyRuns((keys,)), _causal_mask(borders, queries, keys, dtype, native)
    if native and selection.bits is not None:
        bits = selection.block_bits(queries, keys)
        runs = used_runs(bits.amax(0) > 0, KEY_RUN // 8, keys)
        places = [slice((r.start - keys.start) // 8, row_bytes(r.stop - keys.start)) for r in runs.runs]
        return runs, RowMasks(_columns(bits, places))
    mask = selection.mask(queries, keys)
    runs = used_runs(mask.any(0), KEY_RUN, keys)
    mask = _columns(mask, [slice(r.start - keys.start, r.stop - keys.start) for r in runs.runs])
    return runs, RowMasks(pack_bits(mask)) if native else BiasMask(_bias(mask, dtype))


def _causal_mask(
    borders: PackBorders, queries: slice, keys: slice, dtype: torch.dtype, native: bool
) -> TileMask:
    if native:
        first = borders.starts[queries] - keys.start
        last = torch.arange(queries.start + 1, queries.stop + 1) - keys.start
        return RowMasks(None, first.to(torch.int32), last.to(torch.int32))
    # Up to its own first query, a block inside one sequence sees everything.
    alone = borders.block_ends[queries.start // QUERY_BLOCK] >= queries.stop
    first_masked = queries.start if alone else keys.start
    return BiasMask(_bias(visible_mask(borders, queries, slice(first_masked, keys.stop)), dtype))


def used_runs(used: Tensor, unit: int, keys: slice) -> KeyRuns:
    """The ranges of `KEY_RUN` keys of which at least one is used, neighbours joined.

    Args:
        used: [n] bool, whether a query uses something of each column of a mask, or of each byte.
        unit: columns that stand for `KEY_RUN` keys.
        keys: that the columns stand for.
    """
    groups = torch.nn.functional.pad(used, (0, -len(used) % unit)).view(-1, unit).any(1)
    found: list[slice] = []
    for n, any_used in enumerate(groups.tolist()):
        if not any_used:
            continue
        begin = keys.start + n * KEY_RUN
        end = min(begin + KEY_RUN, keys.stop)
        if found and found[-1].stop == begin:
            begin = found.pop().start
        found.append(slice(begin, end))
    return KeyRuns(tuple(found))


def _columns(mask: Tensor, places: list[slice]) -> Tensor:
    """These columns side by side, without a copy where they are all."""
    if places == [slice(0, mask.shape[1])]:
        return mask
    parts = [mask[:, place] for place in places]
    return torch.cat(parts, 1) if parts else mask[:, :0]


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
