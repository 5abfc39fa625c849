"""The model card of an adapter: README.md beside it, for people and for the hubs' front matter.

Knows: what a card says and where a base states its licence. Does not know: how the facts came about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from trimtab.arch.adapter import LoRATarget, target_table
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.source import Source

CARD_NAME = "README.md"
_KEYS = ("license", "license_name", "license_link")
_UNKNOWN = "The base states no licence in its directory: find out which one applies before you pass the adapter on."


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says beside base and targets.

    Args:
        revision: of a base from a hub.
        licence: the base's own statements, see `licence_of`.
        data: name and sha256 of each file trained on.
        results: what was measured, and the value in words.
        versions: of the packages that made the adapter.
    """

    revision: str | None = None
    licence: Mapping[str, str] | None = None
    data: Sequence[Sequence[str]] = ()
    results: Sequence[Sequence[str]] = ()
    versions: Mapping[str, str] | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain values for a manifest."""
        return asdict(self)

    @classmethod
    def read(cls, value: object) -> CardFacts:
        """The facts in a manifest; none where it has no such entry."""
        if not isinstance(value, Mapping):
            return cls()
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


def licence_of(source: Source) -> dict[str, str]:
    """What a checkpoint directory says of its licence: front matter of README.md, first lines of LICENSE."""
    found: dict[str, str] = {}
    if source.has_file(CARD_NAME):
        text = source.read_file(CARD_NAME).decode("utf-8", "replace")
        front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        for line in front[1].splitlines() if front else ():
            key, _, value = line.partition(":")
            if key in _KEYS and value.strip():
                found[key] = value.strip().strip("\"'")
    for name in ("LICENSE", "LICENSE.md", "LICENSE.txt"):
        if source.has_file(name):
            lines = source.read_file(name).decode("utf-8", "replace").splitlines()
            found[name] = next((line.strip(" #") for line in lines if line.strip(" #")), "")
    return found


def card(
    arch: ArchSpec, targets: Sequence[LoRATarget], base: str, fingerprint: str | None,
    facts: CardFacts,
) -> str:
    """The text of README.md.

    Args:
        arch: of the base.
        targets: of the adapter.
        base: path or id of the base.
        fingerprint: `Source.fingerprint` of the base.
        facts: everything else.
    """
    licence = facts.licence or {}
    front = {"base_model": base, "library_name": "peft", "tags": ["lora", "trimtab"]}
    front |= {key: licence[key] for key in _KEYS if key in licence}
    return "\n".join([
        "---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---",
        f"# A LoRA adapter of {arch.name}", "",
        *_base(base, fingerprint, facts.revision), "",
        "## Licence", "", *_licence(licence), "",
        "## Targets", "", *_targets(arch, targets), "",
        "## Data", "",
        *(_table(("file", "sha256"), facts.data) if facts.data else ["Not recorded."]), "",
        "## Results", "",
        *(_table(("measured", "value"), facts.results) if facts.results else ["Not recorded."]), "",
        "## Versions", "",
        ", ".join(f"{name} {version}" for name, version in (facts.versions or {}).items()), "",
    ])


def _base(base: str, fingerprint: str | None, revision: str | None) -> Iterator[str]:
    yield f"- base: {_code(base)}" + (f", revision {_code(revision)}" if revision else "")
    if fingerprint is not None:
        yield (f"- fingerprint of the base: {_code(fingerprint)}, the same for every layout of its "
               "files; `trimtab` refuses another base")


def _licence(licence: Mapping[str, str]) -> Iterator[str]:
    if not licence:
        yield _UNKNOWN
        return
    yield "An adapter is derived from its base, whose licence applies to it as well. The base says:"
    yield ""
    yield from (f"- {name}: {_code(text)}" for name, text in licence.items())


def _targets(arch: ArchSpec, targets: Sequence[LoRATarget]) -> Iterator[str]:
    ranks: dict[str, set[tuple[int, float]]] = {}
    for target in targets:
        ranks.setdefault(target.owner, set()).add((target.rank, target.scaling))
    table = target_table(arch, targets)
    yield from _table(
        ("module", "layers", "adapted", "rank", "scaling", "parameters"),
        [
            (
                row.leaf, row.kind, f"{row.count} of {row.available}",
                ", ".join(str(rank) for rank, _ in sorted(ranks[row.owner])),
                ", ".join(f"{scaling:g}" for _, scaling in sorted(ranks[row.owner])),
                f"{row.num_parameters:,}",
            )
            for row in table.rows
        ],
    )
    yield from ("", *(f"- {note}" for note in table.notes)) if table.notes else ()


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"


def _code(text: str) -> str:
    """Text of a file as it stands, on one line and without markup."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"
