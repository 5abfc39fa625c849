"""Model presets: config.json files in the released format, shipped with the package.

Knows: their names. Does not know: how they are read (see `readers`).
"""

from __future__ import annotations

import difflib
import json
from importlib import resources

from trimtab.errors import ArchError


def preset_names() -> tuple[str, ...]:
    """All presets, sorted.

    >>> "k3.1-tiny" in preset_names()
    True
    """
    files = resources.files(__name__).iterdir()
    names = (file.name for file in files)
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def preset_config(name: str) -> dict[str, object]:
    """The config.json of a preset.

    Raises:
        ArchError: no preset has that name (TT201).

    >>> preset_config("k3.1-tiny")["model_type"]
    'kimi_k3'
    """
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else "see `trimtab inspect --list`"
        raise ArchError("TT201", "preset", f"must be one of {', '.join(names)}", value=name,
                        hint=hint)
    text = (resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, object] = json.loads(text)
    return config
