"""Structure check: the tensors a checkpoint has against those its architecture says it must have.

Knows: how the two tables differ and how to say it briefly. Does not know: torch, values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from trimtab.arch.load import require_readable
from trimtab.arch.maps import accepted_dtypes, accepts_shape, is_carried, stored_tensors
from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError

DifferenceKind = Literal["missing", "extra", "shape", "dtype"]

_CODES: dict[DifferenceKind, str] = {
    "missing": "TT302", "extra": "TT303", "shape": "TT304", "dtype": "TT304",
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not as the architecture says.

    Args:
        kind: what differs.
        name: released name of the tensor.
        expected: what the architecture says, such as `BF16 [64, 32]`; empty for `extra`.
        found: what the file has; empty for `missing`.
    """

    kind: DifferenceKind
    name: str
    expected: str
    found: str

    def as_dict(self) -> dict[str, str]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.name}: missing, expected {self.expected}"
        if self.kind == "extra":
            return f"{self.name}: left over, found {self.found}"
        return f"{self.name}: {self.kind} expected {self.expected}, found {self.found}"


def compare(arch: ArchSpec, entries: Mapping[str, TensorEntry]) -> list[Difference]:
    """Every difference between a checkpoint's tensors and the inventory.

    Shapes and dtypes that lose nothing are no difference: a padded tail (A_log) of any length,
    and where the family allows it BF16 for F32 or the reverse (`maps.accepted_dtypes`). Tensors of
    multi-token prediction layers are none either, whether there or not.

    Args:
        arch: the architecture; its vision tensors, if any, are expected too.
        entries: tensor table of the checkpoint (`Source.entries()`).

    Returns:
        Differences in inventory order, left-over tensors last; empty if all is as it must be.
    """
    needed = {param.name: param.shape for param in inventory(arch)}
    found: list[Difference] = []
    expected_names = set()
    for stored in stored_tensors(arch):
        expected_names.add(stored.name)
        entry = entries.get(stored.name)
        if entry is None:
            expected = _show(stored.dtype, stored.shape)
            found.append(Difference("missing", stored.name, expected, ""))
            continue
        part = needed[stored.param][len(stored.index):]
        if not accepts_shape(stored, part, entry.shape):
            shapes = str(list(stored.shape)), str(list(entry.shape))
            found.append(Difference("shape", stored.name, *shapes))
        if entry.dtype not in accepted_dtypes(arch, stored):
            found.append(Difference("dtype", stored.name, stored.dtype, entry.dtype))
    for name, entry in entries.items():
        if name not in expected_names and not is_skipped(arch, name):
            found.append(Difference("extra", name, "", _show(entry.dtype, entry.shape)))
    return found


def is_skipped(arch: ArchSpec, name: str) -> bool:
    """Whether a tensor belongs to a part that no verb reads: MTP layers, or a tower carried along."""
    if is_carried(arch, name):
        return True
    match = _LAYER.search(name) if arch.mtp else None
    return match is not None and 0 <= int(match[1]) - arch.num_layers < len(arch.mtp)


def skipped_note(arch: ArchSpec, entries: Iterable[str]) -> str | None:
    """One line on tensors that no verb reads; None where there are none.

    Args:
        arch: the architecture.
        entries: names of the checkpoint's tensors.
    """
    names = list(entries)
    carried = sum(is_carried(arch, name) for name in names)
    count = sum(is_skipped(arch, name) for name in names) - carried
    notes = []
    if count:
        layers = _ranges(range(arch.num_layers, arch.num_layers + len(arch.mtp)))
        notes.append(f"layers {layers}: multi-token prediction, {count:,} tensors, skipped")
    if carried:
        notes.append(f"vision tower and projector: {carried:,} tensors, kept and not read")
    return "; ".join(notes) or None


def require_equal(
    arch: ArchSpec, entries: Mapping[str, TensorEntry], where: str, limit: int = 10
) -> None:
    """Raise if a checkpoint cannot be read, or its tensors differ from the inventory.

    Args:
        arch: the architecture.
        entries: tensor table of the checkpoint.
        where: path of the checkpoint, for the message.
        limit: how many grouped differences the message lists.

    Raises:
        CheckpointError: TT302, TT303 or TT304 by the kind of the first difference.
        ArchError: TT205 if the stored form is only recognised.
    """
    require_readable(arch, where)
    differences = compare(arch, entries)
    if not differences:
        return
    lines = summarize(arch, differences)
    shown = "".join(f"\n  {line}" for line in lines[:limit])
    more = f"\n  ... and {len(lines) - limit} more" if len(lines) > limit else ""
    raise CheckpointError(
        _CODES[differences[0].kind], where,
        f"{len(differences)} tensors are not as config.json says:{shown}{more}",
        hint="check that config.json belongs to these weights and that every file is complete; "
        "`trimtab verify structure` lists all differences",
    )


def summarize(arch: ArchSpec, differences: Sequence[Difference]) -> list[str]:
    """One line per difference, whole missing layers and experts drawn together.

    A missing expert reads `layers 3: expert 5 missing (6 tensors)`.
    """
    missing = {d.name for d in differences if d.kind == "missing"}
    lines: list[str] = []
    covered: set[str] = set()
    expected = [stored.name for stored in stored_tensors(arch)] if missing else []
    for key, names in _groups(expected, _LAYER).items():
        if missing.issuperset(names):
            lines.append(f"layers {key[0]}: missing entirely ({len(names)} tensors)")
            covered.update(names)
    experts: dict[int, list[int]] = {}
    for key, names in _groups(expected, _EXPERT).items():
        if missing.issuperset(names) and not covered.issuperset(names):
            experts.setdefault(key[0], []).append(key[1])
            covered.update(names)
    for layer, indices in experts.items():
        word = "expert" if len(indices) == 1 else "experts"
        lines.append(f"layers {layer}: {word} {_ranges(indices)} missing")
    lines.extend(str(d) for d in differences if d.name not in covered)
    return lines


def _groups(names: Iterable[str], pattern: re.Pattern[str]) -> dict[tuple[int, ...], list[str]]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        match = pattern.search(name)
        if match:
            groups.setdefault(tuple(int(n) for n in match.groups()), []).append(name)
    return groups


def _ranges(indices: Sequence[int]) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7]."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _show(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
