"""Vocabularies: text to ids and back, with special tokens known apart.

Knows: tokenizer.json (`JsonVocabulary`); rank files are in `ranks`. Does not know: which token
begins or ends a text, chat formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import tokenizers

from trimtab.errors import DataError


class Vocabulary(Protocol):
    """What a `Tokenizer` needs of a vocabulary.

    Attributes:
        size: one more than the greatest id.
        specials: text of each special token by id.
    """

    size: int
    specials: Mapping[int, str]

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of a text; special tokens in it are read only where allowed."""

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of ids; bytes that are not UTF-8 become the replacement character."""

    def token_id(self, text: str) -> int | None:
        """Id of a special or added token by its text."""


class JsonVocabulary:
    """A tokenizer.json file.

    Args:
        definition: the parsed file.
        names: tokens that tokenizer_config.json names; they are special whatever the file says.
        where: the file, for errors.

    Raises:
        DataError: TT405 where the file cannot be used.
    """

    def __init__(self, definition: Mapping[str, object], names: set[str], where: str) -> None:
        text = json.dumps(_with_specials(definition, names))
        try:
            self._structural = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise DataError("TT405", where, f"cannot be read: {error}") from None
        self._plain.encode_special_tokens = True
        _check_ids(definition, self._structural, where)
        added = self._structural.get_added_tokens_decoder()
        self.specials: Mapping[int, str] = {
            i: token.content for i, token in added.items() if token.special
        }
        self.size = max(self._structural.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of a text, without ids around it."""
        chosen = self._structural if allow_special else self._plain
        ids: list[int] = chosen.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of ids."""
        text: str = self._structural.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_id(self, text: str) -> int | None:
        """Id of a token by its text."""
        found: int | None = self._structural.token_to_id(text)
        return found


def _with_specials(definition: Mapping[str, object], names: set[str]) -> dict[str, object]:
    """Mark the tokens that the config names as special, and drop padding and truncation."""
    added = definition.get("added_tokens")
    tokens = [dict(t) for t in added] if isinstance(added, list) else []
    for token in tokens:
        token["special"] = bool(token.get("special")) or token.get("content") in names
    return {**definition, "added_tokens": tokens, "padding": None, "truncation": None}


def _check_ids(definition: Mapping[str, object], loaded: tokenizers.Tokenizer, where: str) -> None:
    """Refuse a file whose added tokens would get other ids than it states (gaps closed up)."""
    added = definition.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        found = loaded.token_to_id(token["content"])
        if found != token["id"]:
            raise DataError(
                "TT405", where, f"token {token['content']} gets id {found}, the file says "
                f"{token['id']}; its ids have gaps that this format cannot keep",
            )  # fmt: skip
