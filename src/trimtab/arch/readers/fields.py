"""Typed access to the fields of a config.json, with every key accounted for.

Knows: types, ranges, dotted paths, which keys were read. Does not know: any family's keys.

A reader takes each field it understands, names those without effect as noise, and calls
`finish`; whatever is left may change the computation and is an error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trimtab.errors import ArchError


class Fields:
    """One JSON object of a config, read field by field.

    Args:
        values: the parsed object.
        path: dotted path of the object, "" at the top level.
        source: file or preset the config came from, named in every error.

    Raises:
        ArchError: `values` is not an object (TT202).
    """

    def __init__(self, values: object, path: str = "", source: str = "config.json") -> None:
        self.path = path
        self.source = source
        if not isinstance(values, Mapping):
            raise self._error("", values, "must be an object")
        self._values: Mapping[str, Any] = values
        self._read: set[str] = set()
        self._ignored: list[str] = []

    def present(self, key: str) -> bool:
        """True where the key exists and is not null; a null key counts as read."""
        return not self._absent(key)

    def has(self, key: str) -> bool:
        """True where the key exists, null or not; it does not count as read."""
        return key in self._values

    def integer(self, key: str, *, minimum: int = 1, default: int | None = None) -> int:
        """A whole number of at least `minimum`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._error(key, value, f"must be a whole number of at least {minimum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 0) -> int | None:
        """A whole number, or None where the key is absent or null."""
        return None if self._absent(key) else self.integer(key, minimum=minimum)

    def number(self, key: str, *, default: float | None = None, positive: bool = False) -> float:
        """A finite number."""
        value = self._get(key, default)
        bad = isinstance(value, bool) or not isinstance(value, int | float)
        if bad or not math.isfinite(value) or (positive and value <= 0):
            raise self._error(key, value, f"must be a {'positive' if positive else 'finite'} number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None where the key is absent or null."""
        return None if self._absent(key) else self.number(key)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "must be true or false")
        return value

    def choice(self, key: str, allowed: Collection[str], *, default: str | None = None) -> str:
        """One of the given words."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._error(key, value, f"must be one of {', '.join(sorted(allowed))}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._error(key, value, "must be a list of whole numbers")
        return tuple(value)

    def words(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(key, value, "must be a list of strings")
        return tuple(value)

    def word(self, key: str) -> str:
        """A string."""
        value = self._get(key, None)
        if not isinstance(value, str):
            raise self._error(key, value, "must be a string")
        return value

    def first_integer(self, key: str) -> int | None:
        """A whole number of at least 0, or the first of a list of them; None where absent."""
        if self._absent(key) or not isinstance(self._values[key], list):
            return self.optional_integer(key)
        found = self.integers(key)
        if not found or min(found) < 0:
            raise self._error(key, found, "must list whole numbers of at least 0")
        return found[0]

    def section(self, key: str) -> Fields:
        """A nested object."""
        return Fields(self._get(key, None), self._at(key), self.source)

    def keys(self) -> tuple[str, ...]:
        """All keys of the object, in file order."""
        return tuple(self._values)

    def expect(self, key: str, wanted: int | str | bool, why: str) -> None:
        """Require one value of a field that has others elsewhere; an absent key passes.

        Args:
            key: the field.
            wanted: the only value that Trimtab computes.
            why: what the field does, for the message.
        """
        value = self._values.get(key, wanted)
        self._read.add(key)
        if type(value) is not type(wanted) or value != wanted:
            raise self._error(key, value, f"must be {_json(wanted)}; {why}")

    def skip(self, *keys: str) -> None:
        """Read keys without any effect on the weights or the computation."""
        for key in keys:
            if key in self._values:
                self._read.add(key)
                self._ignored.append(self._at(key))

    def finish(self, noise: Collection[str]) -> tuple[str, ...]:
        """Account for every key.

        Args:
            noise: known keys without effect.

        Returns:
            Dotted paths of the keys that were present and ignored.

        Raises:
            ArchError: a key is neither read nor noise (TT203).
        """
        self.skip(*sorted(key for key in self._values if key in noise and key not in self._read))
        unknown = sorted(key for key in self._values if key not in self._read)
        if unknown:
            raise self._unknown(unknown, noise)
        return tuple(self._ignored)

    def fail(self, key: str, rule: str, hint: str | None = None) -> ArchError:
        """An error about a field whose type is right but whose value does not fit the others."""
        return self._error(key, self._values.get(key), rule, hint)

    def _unknown(self, unknown: Sequence[str], noise: Collection[str]) -> ArchError:
        first = unknown[0]
        known = [*self._read, *noise]
        near = difflib.get_close_matches(first, known, n=1, cutoff=0.75)
        hint = f"did you mean `{near[0]}`?" if near else "remove it if it is not from the release"
        rest = "" if len(unknown) == 1 else f"; also unknown here: {', '.join(unknown[1:])}"
        return ArchError(
            "TT203", f"{self.source}: {self._at(first)}",
            f"unknown field, which may change the computation{rest}",
            value=_json(self._values[first]), hint=hint,
        )

    def _absent(self, key: str) -> bool:
        self._read.add(key)
        return self._values.get(key) is None

    def _get(self, key: str, default: object) -> Any:
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        if default is None:
            raise ArchError(
                "TT202", f"{self.source}: {self._at(key)}", "the field is missing",
                hint="compare with the released config.json of the same family",
            )
        return default

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path or key

    def _error(self, key: str, value: object, rule: str, hint: str | None = None) -> ArchError:
        where = f"{self.source}: {self._at(key)}" if self._at(key) else self.source
        return ArchError("TT202", where, rule, value=_json(value), hint=hint)


def _json(value: object) -> str:
    """A value as it stands in the file, shortened."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 60 else f"{text[:57]}..."
