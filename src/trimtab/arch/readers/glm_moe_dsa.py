"""config.json of `glm_moe_dsa` (GLM-5, 5.1, 5.2, 5.3) -> ArchSpec.

Knows: which layers run an indexer and which take over the selection of the layer before. The rest
is `deepseek_text`.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.arch.readers.deepseek_text import Family, read_model
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import ArchSpec

_PATTERN = {"F": "full", "S": "shared"}
# Of the configuration class, where a config has no schedule.
_DEFAULT_OFFSET = 2


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a `glm_moe_dsa` config.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    text = Fields(config, source=source)
    shares = read_schedule(text, text.integer("num_hidden_layers"))
    family = Family("glm_moe_dsa", "GLM-5", indexer_interleaved=True)
    return read_model(text, family, shares)


def read_schedule(text: Fields, depth: int) -> tuple[str, ...]:
    """`full` or `shared` per layer.

    Taken from `indexer_types`, else from `index_topk_pattern` ("FSSF..."), else from
    `index_topk_freq` and its offset: layer i is full where max(i - offset + 1, 0) is a multiple.

    Raises:
        ArchError: a wrong length or word, a first layer without indexer, or two that disagree.
    """
    frequency = text.optional_integer("index_topk_freq", minimum=1)
    offset = text.optional_integer("index_skip_topk_offset")
    offset = _DEFAULT_OFFSET if offset is None else offset
    shares = tuple(
        "full" if max(index - offset + 1, 0) % (frequency or 1) == 0 else "shared"
        for index in range(depth)
    )
    key = "index_topk_freq"
    if text.present("index_topk_pattern"):
        key = "index_topk_pattern"
        shares = tuple(_PATTERN.get(letter, "?") for letter in text.word(key))
    if text.present("indexer_types"):
        named = text.words("indexer_types")
        if (frequency is not None or key == "index_topk_pattern") and named != shares:
            raise text.fail("indexer_types", f"contradicts {key}")
        key, shares = "indexer_types", named
    if len(shares) != depth or not set(shares) <= set(_PATTERN.values()):
        raise text.fail(key, f"must say full or shared for each of {depth} layers")
    if shares[0] != "full":
        raise text.fail(key, "must begin with a layer that has its own indexer")
    return shares
