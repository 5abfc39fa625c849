"""Degrees of parallelism from a recipe or a plan, for verbs that need nothing else of it.

Knows: the `parallel:` section. Does not know: torch, models, the other sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.config.document import KeyPath, read_document
from trimtab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """What a `parallel:` section says of the division of weights.

    Args:
        ep: ranks that share the experts.
        pp: pipeline stages.
        tp: ranks that share a matrix.
        stages: layers of each pipeline stage in order, None to balance them.
    """

    ep: int = 1
    pp: int = 1
    tp: int = 1
    stages: tuple[int, ...] | None = None


def read_degrees(path: str | Path) -> ParallelDegrees:
    """Read `parallel: {ep, pp, tp, stages}`; other keys of the section do not matter here.

    Raises:
        ConfigError: TT107 no such file, TT106 not YAML, TT103 no such section, TT102 a degree that
            is not a positive integer.
    """
    document = read_document(Path(path))
    section = document.values.get("parallel")
    if not isinstance(section, dict):
        raise ConfigError("TT103", document.where(("parallel",)), "is required as a section",
                          hint="parallel: {ep: 8, pp: 2, tp: 1}, or name the degrees as flags")
    degrees = {}
    for key in ("ep", "pp", "tp"):
        value = section.get(key, 1)
        _require_positive(value, document.where(("parallel", key)))
        degrees[key] = value
    stages = section.get("stages")
    if stages is not None:
        place: KeyPath = ("parallel", "stages")
        if not isinstance(stages, list) or not stages:
            rule = "must list the number of layers of each stage"
            raise ConfigError("TT102", document.where(place), rule, value=stages)
        for number in stages:
            _require_positive(number, document.where(place))
        stages = tuple(stages)
    return ParallelDegrees(**degrees, stages=stages)


def _require_positive(value: object, where: str) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError("TT102", where, "must be an integer of at least 1", value=value)
