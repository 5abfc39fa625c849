"""Streaming answers as text, for people.

Knows: one loaded model, its tokenizer, an adapter that can be switched. Does not know: terminals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from trimtab.data.image_source import SOURCE, image_file
from trimtab.data.prompt import ImageProcessor, Prompt, build_prompt, load_image_processor
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.evaluate.run import load_with_adapter
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import stream
from trimtab.models.lora import disabled
from trimtab.train.batch import image_batch
from trimtab.train.reporter import ConsoleReporter

Message = Mapping[str, object]
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Speaker:
    """Answers conversations; made by `load`.

    Args:
        model: with the adapter injected where one was given.
        tokenizer: of the checkpoint.
        max_new_tokens: longest answer.
        raw: continue the last message as plain text instead of answering in the chat format.
        processor: of the checkpoint's images; None for a model of text only.
    """

    model: CausalLM
    tokenizer: Tokenizer
    max_new_tokens: int
    raw: bool
    processor: ImageProcessor | None = None

    @classmethod
    def load(
        cls, path: str, adapter: Path | None, *, base_dtype: str, max_new_tokens: int, raw: bool,
        accept_base: str | None = None,
    ) -> Speaker:
        """Load a checkpoint and an adapter, see `load_with_adapter`."""
        tokenizer = load_tokenizer(path)
        model = load_with_adapter(path, adapter, base_dtype=base_dtype, compute_dtype="auto",
                                  reporter=ConsoleReporter(), accept_base=accept_base)
        return cls(model, tokenizer, max_new_tokens, raw, load_image_processor(path))

    def stream(self, messages: Sequence[Message], *, use_adapter: bool = True) -> Reply:
        """The greedy answer, to be read as it comes.

        Args:
            messages: the conversation so far, ending with the user.
            use_adapter: False answers with the base.
        """
        return Reply(self.tokenizer, self._new_ids(messages, use_adapter), self.raw)

    def _new_ids(self, messages: Sequence[Message], use_adapter: bool) -> Iterator[int]:
        prompt = self._prompt(messages)
        images = image_batch(prompt.images, prompt.image_rows, self.model.embed.weight.device)
        with nullcontext() if use_adapter else disabled(self.model):
            yield from stream(self.model, prompt.token_ids, self.max_new_tokens,
                              self.tokenizer.stop_ids, images=images)

    def _prompt(self, messages: Sequence[Message]) -> Prompt:
        if not self.raw:
            return build_prompt(messages, self.tokenizer, self.processor, where="prompt",
                                add_generation_prompt=True)
        ids = self.tokenizer.encode(str(messages[-1]["content"]))
        begin = self.tokenizer.bos_id
        ids = [begin, *ids] if self.tokenizer.add_bos and begin is not None else ids
        return Prompt(ids, [False] * len(ids), [0] * len(ids))


def user_message(text: str, images: Sequence[Path] = ()) -> Message:
    """What a user says: images first, then the text."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[Message] = [{"type": "image", SOURCE: image_file(path)} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Reply:
    """An answer as it comes: iterate for its text, then ask for the message.

    Args:
        tokenizer: of the checkpoint.
        new_ids: the answer's ids.
        raw: it is text, not in the chat format.
    """

    def __init__(self, tokenizer: Tokenizer, new_ids: Iterable[int], raw: bool = False) -> None:
        self._tokenizer = tokenizer
        self._new_ids = new_ids
        self._raw = raw
        self._ids: list[int] = []

    def __iter__(self) -> Iterator[str]:
        """Pieces of text for people: reasoning, answer, tool calls, as far as they are certain."""
        read = self._tokenizer.decode if self._raw else self._shown
        return text_pieces(read, self._kept())

    def message(self) -> Message:
        """What has come so far, as an assistant message."""
        if self._raw:
            return {"role": "assistant", "content": self._tokenizer.decode(self._ids)}
        return self._tokenizer.read_answer(self._ids).message()

    def _kept(self) -> Iterator[int]:
        for new in self._new_ids:
            self._ids.append(new)
            yield new

    def _shown(self, ids: Sequence[int]) -> str:
        answer = self._tokenizer.read_answer(ids, partial=True)
        calls = (f"{c.name}({_json(c.arguments)})" for c in answer.tool_calls)
        return "\n\n".join(text for text in (answer.reasoning, answer.content, *calls) if text)


def _json(arguments: Mapping[str, object] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def text_pieces(read: Callable[[list[int]], str], ids: Iterable[int]) -> Iterator[str]:
    """Text of a growing list of ids, held back while a character is incomplete.

    Args:
        read: gives the text of ids; more ids must not change the text of those before.
        ids: one after the other.
    """
    seen: list[int] = []
    shown = ""
    for new in ids:
        seen.append(new)
        text = read(seen)
        if text.endswith(_REPLACEMENT):
            continue
        yield text[len(shown):]
        shown = text
    rest = read(seen)
    if len(rest) > len(shown):
        yield rest[len(shown):]
