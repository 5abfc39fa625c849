"""config.json of `kimi_k25` (Kimi K2.5) -> ArchSpec: the text model of Kimi K2 below a tower.

Knows: the nesting text_config / vision_config, and that the tower is carried along, not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trimtab.arch.readers import kimi_text
from trimtab.arch.readers.deepseek_text import Family, read_model
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import ArchSpec

_NOISE = kimi_text.NOISE | {
    "bos_token_id", "dtype", "eos_token_id", "ignore_index", "media_placeholder_token_id",
    "pad_token_id", "torch_dtype", "use_unified_vision_chunk", "video_placeholder", "vision_config",
}
IMAGES = "images: vision tower and projector are kept in the files and never run"


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a `kimi_k25` config.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    top = Fields(config, source=source)
    top.expect("model_type", "kimi_k25", "this reader knows one family")
    text = top.section("text_config")
    arch = read_model(text, Family("kimi_k2", "Kimi K2.5", sparse=False))
    if top.boolean("tie_word_embeddings", default=arch.tie_word_embeddings) != arch.tie_word_embeddings:
        raise top.fail("tie_word_embeddings", "contradicts text_config.tie_word_embeddings")
    tower = (IMAGES,) if top.present("vision_config") else ()
    ignored = arch.ignored + top.finish(_NOISE)
    return replace(arch, family="kimi_k25", unsupported=arch.unsupported + tower, ignored=ignored)
