"""config.json of `deepseek_v32` (DeepSeek-V3.2) -> ArchSpec.

Knows: that every layer runs its own indexer, rotated in halves. The rest is `deepseek_text`.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.arch.readers.deepseek_text import Family, read_model
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import ArchSpec


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a `deepseek_v32` config.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    return read_model(Fields(config, source=source), Family("deepseek_v32", "DeepSeek-V3.2"))
