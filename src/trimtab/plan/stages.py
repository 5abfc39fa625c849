"""Which layers a pipeline stage holds.

Knows: where a model may be cut. Does not know: what a layer costs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trimtab.arch.outline import Outline, OutlineLayer
from trimtab.arch.spec import AttnRes, MLASpec


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` to `last`, the latter excluded.

    Args:
        index: of the stage.
        first, last: layer indices.
        has_embedding: the first stage.
        has_head: the last stage.
    """

    index: int
    first: int
    last: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self.last - self.first


class Kinds:
    """The different layers of a model, numbered, so that sums over many layers stay cheap.

    Args:
        outline: the model.
    """

    def __init__(self, outline: Outline) -> None:
        self.layers: tuple[OutlineLayer, ...] = tuple(dict.fromkeys((*outline.layers, *outline.mtp)))
        number = {layer: i for i, layer in enumerate(self.layers)}
        self._of = tuple(number[layer] for layer in outline.layers)
        self.mtp = tuple(number[layer] for layer in outline.mtp)
        self._counts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def count(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """(kind, layers of it) from `first` to `last`, the latter excluded."""
        key = (first, last)
        if key not in self._counts:
            self._counts[key] = tuple(Counter(self._of[first:last]).items())
        return self._counts[key]


def telling(kinds: Kinds, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages that can need most or take longest: of equal ones the first and the last."""
    ends: dict[object, list[Stage]] = {}
    for stage in stages:
        key = (kinds.count(stage.first, stage.last), stage.has_embedding, stage.has_head)
        ends.setdefault(key, []).append(stage)
    chosen = {stage.index: stage for group in ends.values() for stage in (group[0], group[-1])}
    return tuple(chosen[index] for index in sorted(chosen))


def allowed_cuts(outline: Outline) -> list[int]:
    """Layer indices that a stage may begin with: no follower of a shared selection."""
    cuts = []
    for index in range(1, outline.num_layers):
        mixer = outline.layers[index].mixer
        indexer = mixer.indexer if isinstance(mixer, MLASpec) else None
        if indexer is None or indexer.share == "full":
            cuts.append(index)
    return cuts


def split(outline: Outline, pp: int, counts: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    """Divide the layers among `pp` stages.

    Where the residual stream is banked in blocks, cuts fall on their borders if there are enough
    of them, so that the fewest rows travel. Otherwise stages are as even as they can be, with the
    shorter ones at the two ends, which also hold table and head.

    Args:
        outline: the model.
        pp: number of stages.
        counts: layers per stage, if they are given.
    """
    borders = _given(counts) if counts else _blocks(outline, pp) or _even(outline, pp)
    starts = [0, *borders]
    ends = [*borders, outline.num_layers]
    return tuple(
        Stage(i, first, last, i == 0, i == pp - 1)
        for i, (first, last) in enumerate(zip(starts, ends, strict=True))
    )


def _given(counts: tuple[int, ...]) -> list[int]:
    borders, total = [], 0
    for count in counts[:-1]:
        total += count
        borders.append(total)
    return borders


def _blocks(outline: Outline, pp: int) -> list[int] | None:
    if not isinstance(outline.residual, AttnRes):
        return None
    size = outline.residual.block_size
    blocks = -(-outline.num_layers // size)
    if blocks % pp:
        return None
    return [size * blocks // pp * i for i in range(1, pp)]


def _even(outline: Outline, pp: int) -> list[int]:
    base, extra = divmod(outline.num_layers, pp)
    # Longer stages in the middle: the ends also hold table and head.
    lead = (pp - extra) // 2
    counts = [base + (lead <= i < lead + extra) for i in range(pp)]
    cuts = set(allowed_cuts(outline))
    borders, total = [], 0
    for count in counts[:-1]:
        total += count
        near = min(cuts, key=lambda cut: abs(cut - total), default=total)
        borders.append(near)
    return borders
