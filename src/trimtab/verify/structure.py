"""Structure check of a checkpoint as verdicts.

Knows: how differences are counted and named. Does not know: torch, how they are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.arch.load import load_arch, require_readable
from trimtab.checkpoint.source import open_source
from trimtab.checkpoint.structure import (
    Difference,
    DifferenceKind,
    compare,
    skipped_note,
    summarize,
)
from trimtab.verdict import Verdict

_NAMES: dict[DifferenceKind, str] = {
    "missing": "tensors missing", "extra": "tensors left over",
    "shape": "tensors of another shape", "dtype": "tensors of another dtype",
}


@dataclass(frozen=True, slots=True)
class StructureReport:
    """Verdicts per kind of difference, all differences, and them and what is skipped in few lines."""

    verdicts: list[Verdict]
    differences: list[Difference]
    lines: list[str]
    num_tensors: int


def check_structure(path: str | Path) -> StructureReport:
    """Hold the headers of a checkpoint against the inventory of its config.

    Raises:
        CheckpointError: the files cannot be read (TT301, TT302, TT305, TT307, TT308).
        ArchError: config.json is not understood, or TT205 its stored form is only recognised.
    """
    source = open_source(path)
    arch = load_arch(source.config(), source.where)
    require_readable(arch, source.where)
    entries = source.entries()
    differences = compare(arch, entries)
    verdicts = []
    for kind, name in _NAMES.items():
        of_kind = [d.name for d in differences if d.kind == kind]
        where = of_kind[0] if of_kind else ""
        verdicts.append(Verdict.at_most(name, len(of_kind), 0, where))
    lines = summarize(arch, differences)
    note = skipped_note(arch, entries)
    if note is not None:
        lines.append(note)
    return StructureReport(verdicts, differences, lines, len(entries))
