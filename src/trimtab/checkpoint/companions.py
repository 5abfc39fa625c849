"""What stands beside the weights of a checkpoint: small files, and what its config says of them.

Knows: which files are copied and the fields of a config that every family has. Does not know:
torch, tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trimtab.checkpoint.source import Source

COPIED_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "preprocessor_config.json",
    "tiktoken.model", "vocab.json", "merges.txt", "LICENSE",
)
# The release's own code, which is never run here, and what it says for people.
_ALSO = (".py", ".md", ".txt", ".jinja")


def companion_files(source: Source) -> dict[str, bytes]:
    """Tokenizer, chat template, licence, the release's code and the like, by name."""
    found = {name for name in COPIED_FILES if source.has_file(name)}
    found |= {name for name in source.names() if name.endswith(_ALSO) or name.startswith("LICENSE")}
    return {name: source.read_file(name) for name in sorted(found)}


def config_with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config of the same model with plain weights of another dtype (`float32`, ...)."""
    changed = copy.deepcopy(dict(config))
    for part in (changed, changed.get("text_config")):
        if not isinstance(part, dict):
            continue
        part.pop("quantization_config", None)
        key = "torch_dtype" if "torch_dtype" in part else "dtype"
        part[key] = dtype
    return changed


def config_without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model without multi-token prediction layers."""
    changed = copy.deepcopy(dict(config))
    for part in (changed, changed.get("text_config")):
        if isinstance(part, dict) and "num_nextn_predict_layers" in part:
            part["num_nextn_predict_layers"] = 0
    return changed
