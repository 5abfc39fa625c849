"""Streaming answers as text, for people.

Knows: one loaded model, its tokenizer, an adapter that can be switched. Does not know: terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.evaluate.run import load_with_adapter
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import stream
from trimtab.models.lora import disabled
from trimtab.train.reporter import ConsoleReporter

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Speaker:
    """Answers conversations; made by `load`.

    Args:
        model: with the adapter injected where one was given.
        tokenizer: of the checkpoint.
        max_new_tokens: longest answer.
        raw: continue the last message as plain text instead of answering in the chat format.
    """

    model: CausalLM
    tokenizer: Tokenizer
    max_new_tokens: int
    raw: bool

    @classmethod
    def load(
        cls, path: str, adapter: Path | None, *, base_dtype: str, max_new_tokens: int, raw: bool
    ) -> Speaker:
        """Load a checkpoint and an adapter."""
        tokenizer = load_tokenizer(path)
        model = load_with_adapter(path, adapter, base_dtype=base_dtype, compute_dtype="auto",
                                  reporter=ConsoleReporter())
        return cls(model, tokenizer, max_new_tokens, raw)

    def stream(
        self, messages: Sequence[Mapping[str, str]], *, use_adapter: bool = True
    ) -> Iterator[str]:
        """Pieces of the greedy answer as they come.

        Args:
            messages: the conversation so far, ending with the user.
            use_adapter: False answers with the base.
        """
        ids = self._prompt(messages)
        with nullcontext() if use_adapter else disabled(self.model):
            new = stream(self.model, ids, self.max_new_tokens, self.tokenizer.stop_ids)
            yield from text_pieces(self.tokenizer, new)

    def _prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self.raw:
            return self.tokenizer.render(messages, add_generation_prompt=True).token_ids
        ids = self.tokenizer.encode(messages[-1]["content"])
        begin = self.tokenizer.bos_id
        return [begin, *ids] if self.tokenizer.add_bos and begin is not None else ids


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
