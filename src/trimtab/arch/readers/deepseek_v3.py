"""config.json of `deepseek_v3` (DeepSeek-V3, R1) and `kimi_k2` (Kimi K2) -> ArchSpec.

Knows: that these have no indexer. The rest is `deepseek_text`.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.arch.readers.deepseek_text import Family, read_model
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import ArchSpec

_NAMES = {"deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi K2"}


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a config of one of the two.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    text = Fields(config, source=source)
    kind = text.choice("model_type", _NAMES)
    return read_model(text, Family(kind, _NAMES[kind], sparse=False))
