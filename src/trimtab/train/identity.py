"""Whether an output directory belongs to this run: which recipe values may change on resume.

Knows: recipes as plain mappings. Does not know: files, torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FREE_KEYS = frozenset({
    "cluster", "devices", "parallel", "ops", "evaluate", "checkpoint", "track",
    "validate.max_tokens", "validate.keep_best", "validate.stop_after",
    "output", "finetune.steps", "finetune.epochs", "finetune.recompute", "finetune.on_nan",
    "finetune.base_residency", "finetune.memory_limit", "finetune.offload", "finetune.drift",
    "finetune.lora.check_steps", "finetune.lora.serve_with",
})
"""Keys that change how a run is carried out or how long it goes on, not what it computes."""

_FIXED_WITHIN = {"parallel": "capacity_factor"}
"""What below a free key changes what is computed all the same: a capacity factor drops tokens."""

Tree = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs from the run that owns the directory."""

    key: str
    ours: object
    theirs: object


def fixed_differences(theirs: Tree, ours: Tree) -> list[Difference]:
    """Values outside `FREE_KEYS` that differ, in order of their dotted keys."""
    old, new = dict(_leaves(theirs)), dict(_leaves(ours))
    return [
        Difference(key, new.get(key), old.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def fixed_hash(recipe: Tree) -> str:
    """sha256 over everything outside `FREE_KEYS`."""
    text = json.dumps(sorted(_leaves(recipe)), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in FREE_KEYS:
            inner = _FIXED_WITHIN.get(path)
            if inner is not None and isinstance(value, Mapping):
                yield f"{path}.{inner}", value.get(inner)
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
