"""Where files lie that can be made again, apart from any run."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """A directory below `TRIMTAB_CACHE`, else below the user's cache directory; not made here."""
    given = os.environ.get("TRIMTAB_CACHE")
    if given:
        return Path(given) / name
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trimtab" / name
