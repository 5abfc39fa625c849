"""New tokens of several sequences side by side, for attention against their caches."""

from __future__ import annotations

from torch import Tensor

from trimtab.models.context import ForwardContext

# New tokens of a sequence whose scores against its cache exist at once.
QUERIES = 64


class PaddedTokens:
    """Flat tokens of N sequences as [N, t, ...], short sequences repeating slot 0 at the end."""

    def __init__(self, ctx: ForwardContext, slots: Tensor) -> None:
        self._rows, self._columns = ctx.sequence_ids, ctx.positions
        self._shape = (len(ctx.lengths), max(ctx.lengths))
        self.slots = self.pad(slots)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [N, t, ...]."""
        out = x.new_zeros(*self._shape, *x.shape[1:])
        out[self._rows, self._columns] = x
        return out

    def unpad(self, x: Tensor) -> Tensor:
        """[N, t, ...] -> [T, ...]."""
        return x[self._rows, self._columns]
