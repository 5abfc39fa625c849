"""Verdict: the result of one check, with its number and its limit.

Knows: how a check reports. Does not know: what is checked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check: `passed` says whether `measured` keeps within `limit`.

    Args:
        name: what was checked, in words.
        measured: the number found.
        limit: the number allowed, or None where the check only reports.
        passed: the outcome.
        where: tensor, file or layer with the worst value.
    """

    name: str
    measured: float
    limit: float | None
    passed: bool
    where: str = ""

    @classmethod
    def at_most(cls, name: str, measured: float, limit: float, where: str = "") -> Verdict:
        """A check that passes when `measured <= limit`; NaN fails."""
        return cls(name, measured, limit, bool(measured <= limit), where)

    @classmethod
    def at_least(cls, name: str, measured: float, limit: float, where: str = "") -> Verdict:
        """A check that passes when `measured >= limit`; NaN fails."""
        return cls(name, measured, limit, bool(measured >= limit), where)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" (limit {self.limit:.4g})"
        where = f" at {self.where}" if self.where else ""
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.measured:.4g}{limit}{where}"
