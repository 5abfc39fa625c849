"""Streaming answers as text, for people.

Knows: one loaded model, its tokenizer, an adapter that can be switched. Does not know: terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        cls, path: str, adapter: Path | None, *, base_dtype: str, max_new_tokens: int, raw: bool
    ) -> Speaker:
        """Load a checkpoint and an adapter."""
        tokenizer = load_tokenizer(path)
        model = load_with_adapter(path, adapter, base_dtype=base_dtype, compute_dtype="auto",
                                  reporter=ConsoleReporter())
        return cls(model, tokenizer, max_new_tokens, raw, load_image_processor(path))

    def stream(
        self, messages: Sequence[Message], *, use_adapter: bool = True
    ) -> Iterator[str]:
        """Pieces of the greedy answer as they come.

        Args:
            messages: the conversation so far, ending with the user.
            use_adapter: False answers with the base.
        """
        prompt = self._prompt(messages)
        images = image_batch(prompt.images, prompt.image_rows, self.model.embed.weight.device)
        with nullcontext() if use_adapter else disabled(self.model):
            new = stream(self.model, prompt.token_ids, self.max_new_tokens,
                         self.tokenizer.stop_ids, images=images)
            yield from text_pieces(self.tokenizer, new)

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


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text of a growing list of ids, held back while a character is incomplete."""
    seen: list[int] = []
    shown = ""
    for new in ids:
        seen.append(new)
        text = tokenizer.decode(seen)
        if text.endswith(_REPLACEMENT):
            continue
        yield text[len(shown):]
        shown = text
    rest = tokenizer.decode(seen)
    if len(rest) > len(shown):
        yield rest[len(shown):]
