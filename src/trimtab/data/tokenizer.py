"""Text to token ids and back, and conversations to ids with a loss mask.

Knows: the tokenizer files, tokenizer_config.json and the chat format of a checkpoint. Does not
know: records, packs, models. Every special id comes from those files.

What people wrote is encoded with special tokens read as ordinary text, so that a typed
`<|end_of_msg|>` never becomes the marker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.data.chat import Answer, ChatFormat, ChatOptions, Message, Piece
from trimtab.data.k3_format import CONTROL, K3Format
from trimtab.data.k3_parse import parse_answer
from trimtab.data.model_files import read_bytes, read_json, read_text
from trimtab.data.ranks import RankVocabulary
from trimtab.data.template import ChatTemplate
from trimtab.data.vocabulary import JsonVocabulary, Vocabulary
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
        template: the chat format: the checkpoint's template, K3's own, or None.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        config: Mapping[str, object],
        template: str | None,
        stop_ids: Sequence[int],
        where: str,
        is_k3: bool = False,
    ) -> None:
        self._where = where
        self._vocabulary = vocabulary
        named = _named_tokens(config)
        self.vocab_size = vocabulary.size
        self.special_ids = frozenset(vocabulary.specials)
        self.bos_id = self._id(named, "bos_token")
        self.eos_id = self._id(named, "eos_token")
        pad_id = self._id(named, "pad_token")
        self.pad_id = pad_id if pad_id is not None else (self.eos_id or 0)
        self.add_bos = bool(config.get("add_bos_token", False)) and self.bos_id is not None
        markers = {text: i for i, text in sorted(vocabulary.specials.items())}
        self._writes_elements = is_k3 and markers.keys() >= set(CONTROL)
        self.template: ChatFormat | None = None
        if template is not None:
            self.template = ChatTemplate(template, named, [*markers], f"{where} (chat template)")
        elif self._writes_elements:
            self.template = K3Format(where, markers.keys())
        ends = {*stop_ids, *([] if self.eos_id is None else [self.eos_id]), *self._end_marker()}
        self.stop_ids = tuple(sorted(ends))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text, without ids around it.

        Args:
            text: anything; markers in it stay ordinary text.
            allow_special: read markers as special tokens; only for text of the format itself.
        """
        ids = self._vocabulary.encode(text, allow_special)
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
        return self._vocabulary.decode(ids, skip_special)

    def segments(self, ids: Iterable[int]) -> list[tuple[str, bool]]:
        """Text of ids as (text, is a special token) segments, what `encode_segments` takes."""
        found: list[tuple[str, bool]] = []
        for special, group in itertools.groupby(ids, self.special_ids.__contains__):
            if special:
                found.extend((self.decode([i]), True) for i in group)
            else:
                found.append((self.decode(list(group)), False))
        return found

    def read_answer(
        self, ids: Sequence[int], options: ChatOptions | None = None, *, partial: bool = False
    ) -> Answer:
        """Take apart what the model wrote after the generation prompt.

        Of K3's format reasoning, text and tool calls are told apart; of a template all is text.

        Args:
            ids: generated, with or without the end marker.
            options: those that the prompt was rendered with.
            partial: more will follow; nothing is returned that it could take back.
        """
        if self._writes_elements:
            thinking = (options or ChatOptions()).thinking
            return parse_answer(self.segments(ids), thinking, partial)
        ended = len(ids) > 0 and ids[-1] in self.stop_ids
        return Answer(self.decode(ids[:-1] if ended else ids))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        options: ChatOptions | None = None,
    ) -> Rendered:
        """Encode a conversation through the checkpoint's template, or in K3's format.

        Args:
            messages: mappings with `role` and `content`, and what else the template reads.
            tools: tool descriptions, where the template takes them.
            add_generation_prompt: end with the opening of an answer.
            options: of one request; None leaves it to the format.

        Raises:
            DataError: TT404 without a template, or where it does not fit the conversation.
        """
        if self.template is None:
            raise DataError(
                "TT404", self._where, "the checkpoint has no chat template",
                hint="put chat_template.jinja beside tokenizer.json, or use `text` records",
            )  # fmt: skip
        rendered = Rendered([], [], [])
        template = self.template if options is None else self.template.with_options(options)
        for piece in template.pieces(messages, tools, add_generation_prompt):
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
        found = self._vocabulary.token_id(named[name])
        if found is None:
            raise DataError(
                "TT405", self._where, f"lacks {name} of tokenizer_config.json",
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

    Reads tokenizer.json, or tiktoken.model where there is none; tokenizer_config.json; the
    template (chat_template.jinja, chat_template.json or inside tokenizer_config.json), without
    which models of the K3 family get K3's own format; the end ids of generation_config.json and
    config.json.

    Raises:
        DataError: TT405 where there is no tokenizer or it cannot be used; TT404 where the
            template is not valid.
    """
    config = read_json(model_dir, "tokenizer_config.json") or {}
    model_config = read_json(model_dir, "config.json") or {}
    vocabulary, where = _load_vocabulary(model_dir, config, model_config)
    stop_ids: set[int] = set()
    for source in (read_json(model_dir, "generation_config.json") or {}, model_config):
        found = source.get("eos_token_id")
        stop_ids |= {
            i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)
        }
    template = _find_template(model_dir, config)
    is_k3 = model_config.get("model_type") == "kimi_k3"
    return Tokenizer(vocabulary, config, template, sorted(stop_ids), where, is_k3)


def _load_vocabulary(
    model_dir: str | Path, config: Mapping[str, object], model_config: Mapping[str, object]
) -> tuple[Vocabulary, str]:
    """The vocabulary and the path of its file."""
    where = f"{str(model_dir).rstrip('/')}/tokenizer.json"
    definition = read_json(model_dir, "tokenizer.json")
    if definition is not None:
        return JsonVocabulary(definition, set(_named_tokens(config).values()), where), where
    ranks = read_bytes(model_dir, "tiktoken.model")
    if ranks is None:
        raise DataError(
            "TT405", where, "no such file, and no tiktoken.model",
            hint="put tokenizer.json or tiktoken.model beside config.json",
        )  # fmt: skip
    where = f"{str(model_dir).rstrip('/')}/tiktoken.model"
    text_config = model_config.get("text_config")
    inner = text_config if isinstance(text_config, Mapping) else model_config
    size = inner.get("vocab_size")
    return RankVocabulary(ranks, config, size if isinstance(size, int) else None, where), where


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


def _find_template(model_dir: str | Path, config: Mapping[str, object]) -> str | None:
    text = read_text(model_dir, "chat_template.jinja")
    if text is not None:
        return text
    stored = (read_json(model_dir, "chat_template.json") or config).get("chat_template")
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
