"""ChoiceTape: the discrete choices of a forward pass, recorded and replayed.

A recomputed layer must route its tokens as the first pass did. The tape holds expert ids and
selected keys, never weights: scores are computed again at the taped ids, so that gradients flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar, cast

from torch import Tensor

from trimtab.ops.attention.selection import Selection

# Expert ids, or the keys that queries attend to.
Choice = Tensor | Selection
C = TypeVar("C", bound=Choice)
Mode = Literal["record", "replay", "force"]
Key = tuple[int, str]


class ChoiceTape:
    """Choices of one micro-batch, keyed by (layer, kind).

    `record` stores what is chosen; `replay` returns it to a recomputation, any number of times;
    `force` imposes the choices of another run, each of which must be used exactly once.
    """

    def __init__(self, mode: Mode = "record", choices: Mapping[Key, Choice] | None = None) -> None:
        self.mode: Mode = mode
        self.choices: dict[Key, Choice] = {} if choices is None else dict(choices)
        self._used: set[Key] = set()

    def choose(self, layer: int, kind: str, compute: Callable[[], C]) -> C:
        """The taped choice, or the result of `compute`, which is then taped.

        Raises:
            RuntimeError: an entry is missing in replay or force, or stands twice in record.
        """
        key = (layer, kind)
        if self.mode == "record":
            if key in self.choices:
                raise RuntimeError(f"choice {key} was recorded twice in one micro-batch")
            self.choices[key] = compute()
        elif key not in self.choices:
            raise RuntimeError(f"choice {key} is not on the tape")
        self._used.add(key)
        return cast(C, self.choices[key])  # a key always holds the kind that was computed for it

    def check_all_used(self) -> None:
        """Raise RuntimeError if a forced choice was not used."""
        left = set(self.choices) - self._used
        if left:
            raise RuntimeError(f"choices left over on the tape: {sorted(left)[:5]}")

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay inside the block; used around recomputation."""
        before, self.mode = self.mode, "replay"
        try:
            yield
        finally:
            self.mode = before
