"""Records that are not used: how many, where they stand and why.

Knows: places and reasons. Does not know: files, records.
"""

from __future__ import annotations

_SHOWN = 5


class LeftOut:
    """Places of records, each once, with the reason why it is left out."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def add(self, where: str, reason: str) -> None:
        """Note `file:line`."""
        self._reasons.setdefault(where, reason)

    def __len__(self) -> int:
        return len(self._reasons)

    def __str__(self) -> str:
        return f"{len(self):,}"

    def places(self) -> str:
        """The first of them in words."""
        shown = [f"{where} ({reason})" for where, reason in list(self._reasons.items())[:_SHOWN]]
        more = f" and {len(self) - _SHOWN:,} more" if len(self) > _SHOWN else ""
        return ", ".join(shown) + more

    def first(self) -> list[str]:
        """`file:line: reason` of the first of them."""
        return [f"{where}: {reason}" for where, reason in list(self._reasons.items())[:_SHOWN]]
