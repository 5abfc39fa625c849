"""Text to token ids and back, and conversations to ids with a loss mask.

Knows: tokenizer.json, tokenizer_config.json and the chat template of a checkpoint. Does not know:
records, packs, models. Every special id comes from those files.

What people wrote is encoded by an instance that treats special tokens as ordinary text, so that a
typed `<|end_of_msg|>` never becomes the marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from trimtab.data.template import ChatTemplate, Message, Piece
from trimtab.errors import DataError

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it; all lists have one item per token.

    Args:
        token_ids: input ids.
        loss_mask: True where the token is to be predicted.
        messages: index of the message whose text a token came from; None for the template's own.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    messages: list[int | None]


class Tokenizer:
    """Encodes and decodes; made by `load_tokenizer`.

    Attributes:
        vocab_size: one more than the greatest id.
        bos_id: id put before a text, or None.
        eos_id: id put after a text, or None.
        pad_id: id that fills packs.
        special_ids: ids that ordinary text never yields.
        stop_ids: ids at which an answer ends.
        add_bos: whether texts start with `bos_id`.
        template: the chat template, or None.
    """

    def __init__(
        self,
        definition: Mapping[str, object],
        config: Mapping[str, object],
        template: str | None,
        stop_ids: Sequence[int],
        where: str,
    ) -> None:
        self._where = where
        named = _named_tokens(config)
        text = json.dumps(_with_specials(definition, set(named.values())))
        try:
            self._structural = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise DataError("TT405", where, f"cannot be read: {error}") from None
        self._plain.encode_special_tokens = True
        added = self._structural.get_added_tokens_decoder()
        _check_ids(definition, self._structural, where)
        vocabulary = self._structural.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = self._id(named, "bos_token")
        self.eos_id = self._id(named, "eos_token")
        pad_id = self._id(named, "pad_token")
        self.pad_id = pad_id if pad_id is not None else (self.eos_id or 0)
        self.add_bos = bool(config.get("add_bos_token", False)) and self.bos_id is not None
        self.template: ChatTemplate | None = None
        if template is not None:
            markers = [added[i].content for i in sorted(self.special_ids)]
            self.template = ChatTemplate(template, named, markers, f"{where} (chat template)")
        ends = {*stop_ids, *([] if self.eos_id is None else [self.eos_id]), *self._end_marker()}
        self.stop_ids = tuple(sorted(ends))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text, without ids around it.

        Args:
            text: anything; markers in it stay ordinary text.
            allow_special: read markers as special tokens; only for text of the format itself.
        """
        chosen = self._structural if allow_special else self._plain
        ids: list[int] = chosen.encode(text, add_special_tokens=False).ids
        if not allow_special and not self.special_ids.isdisjoint(ids):
            raise DataError(
                "TT405", self._where, "its vocabulary yields special tokens for ordinary text",
                value=text[:40],
            )  # fmt: skip
        return ids

    def encode_document(self, text: str) -> list[int]:
        """Ids of a whole text, with the begin and end ids that the checkpoint's files name."""
        begin = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return [*begin, *self.encode(text), *([] if self.eos_id is None else [self.eos_id])]

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, is it the format's own) segments, each encoded for itself."""
        return [
            i for text, own in segments for i in self.encode(text, allow_special=own)
        ]  # fmt: skip

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become the replacement character."""
        text: str = self._structural.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Encode a conversation through the checkpoint's template.

        Args:
            messages: mappings with `role` and `content`, and what else the template reads.
            tools: tool descriptions, where the template takes them.
            add_generation_prompt: end with the opening of an answer.

        Raises:
            DataError: TT404 without a template, or where it does not fit the conversation.
        """
        if self.template is None:
            raise DataError(
                "TT404", self._where, "the checkpoint has no chat template",
                hint="put chat_template.jinja beside tokenizer.json, or use `text` records",
            )  # fmt: skip
        rendered = Rendered([], [], [])
        for piece in self.template.pieces(messages, tools, add_generation_prompt):
            ids = self._encode_piece(piece)
            rendered.token_ids.extend(ids)
            rendered.loss_mask.extend([piece.supervised] * len(ids))
            rendered.messages.extend([piece.message] * len(ids))
        return rendered

    def _encode_piece(self, piece: Piece) -> list[int]:
        return self.encode(piece.text, allow_special=piece.own)

    def _id(self, named: Mapping[str, str], name: str) -> int | None:
        if name not in named:
            return None
        found: int | None = self._structural.token_to_id(named[name])
        if found is None:
            raise DataError(
                "TT405", self._where, f"{name} of tokenizer_config.json is not in tokenizer.json",
                value=named[name],
            )  # fmt: skip
        return found

    def _end_marker(self) -> list[int]:
        """The special token that ends an answer, learned from a one-turn conversation."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        if self.template is None:
            return []
        try:
            rendered = self.render(probe)
        except DataError:
            return []
        answer = [i for i, m in zip(rendered.token_ids, rendered.loss_mask, strict=True) if m]
        return answer[-1:] if answer and answer[-1] in self.special_ids else []


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint directory or fsspec URL.

    Reads tokenizer.json, tokenizer_config.json, the template (chat_template.jinja,
    chat_template.json or inside tokenizer_config.json) and the end ids of generation_config.json
    and config.json.

    Raises:
        DataError: TT405 where there is no tokenizer.json or it cannot be used; TT404 where the
            template is not valid.
    """
    where = f"{str(model_dir).rstrip('/')}/tokenizer.json"
    definition = _read_json(model_dir, "tokenizer.json")
    if definition is None:
        raise DataError(
            "TT405", where, "no such file", hint="put tokenizer.json beside config.json"
        )
    config = _read_json(model_dir, "tokenizer_config.json") or {}
    stop_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = (_read_json(model_dir, name) or {}).get("eos_token_id")
        stop_ids |= {
            i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)
        }
    return Tokenizer(definition, config, _find_template(model_dir, config), sorted(stop_ids), where)


def check_token_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Refuse ids that a model with `vocab_size` rows cannot embed.

    Raises:
        DataError: TT403 for the first id that is negative or too large.
    """
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise DataError(
                "TT403", f"{where}, token {index}", f"must be from 0 to {vocab_size - 1}",
                value=token_id,
            )  # fmt: skip


def _read(model_dir: str | Path, name: str) -> str | None:
    """Text of a file of a local directory, URL or hub id; None where there is none."""
    where = f"{str(model_dir).rstrip('/')}/{name}"
    try:
        return _read_bytes(str(model_dir), name).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        raise DataError("TT405", where, "is not UTF-8 text") from None
    except ImportError as error:
        hint = "pip install 'trimtab[http]' (or [s3], [hub], or the package fsspec names)"
        rule = str(error)
        if "://" not in where:
            rule = f"is no local directory, and to read it as a hub id: {error}"
        raise DataError("TT604", where, rule, hint=hint) from None
    except Exception as error:
        # Each file system behind fsspec has errors of its own.
        raise DataError("TT405", where, f"cannot be read: {error}") from error


def _read_bytes(model_dir: str, name: str) -> bytes:
    remote = "://" in model_dir
    if not remote and (Path(model_dir).exists() or not _HUB_ID.fullmatch(model_dir)):
        return (Path(model_dir) / name).read_bytes()
    from fsspec.core import url_to_fs  # type: ignore[import-untyped] # it ships no types

    filesystem, root = url_to_fs(model_dir if remote else f"hf://{model_dir}")
    data: bytes = filesystem.cat_file(f"{root.rstrip('/')}/{name}")
    return data


def _read_json(model_dir: str | Path, name: str) -> dict[str, object] | None:
    text = _read(model_dir, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{model_dir}/{name}:{error.lineno}"
        raise DataError("TT405", where, f"not valid JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise DataError("TT405", f"{model_dir}/{name}", "must hold one JSON object")
    return value


def _find_template(model_dir: str | Path, config: Mapping[str, object]) -> str | None:
    text = _read(model_dir, "chat_template.jinja")
    if text is not None:
        return text
    stored = (_read_json(model_dir, "chat_template.json") or config).get("chat_template")
    if isinstance(stored, list):
        by_name = {str(item["name"]): item["template"] for item in stored if "template" in item}
        stored = by_name.get("default", next(iter(by_name.values()), None))
    return stored if isinstance(stored, str) else None


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Texts of bos_token and its like; each is stored as a text or as an object."""
    named = {}
    for name in _NAMED:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


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
