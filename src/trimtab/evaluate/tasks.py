"""Exact match: the model answers each conversation greedily, and an answer is right or not.

Knows: conversations, generation, comparison of strings. Does not know: recipes, adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.data.tokenizer import Tokenizer
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate

Progress = Callable[[int, int], None]
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation without its last assistant message, and that message.

    Args:
        messages: what the model sees.
        expected: the answer.
    """

    messages: tuple[Message, ...]
    expected: str

    @property
    def shown(self) -> str:
        """The last user message."""
        return str(self.messages[-1]["content"]) if self.messages else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to one question."""

    question: Question
    text: str

    @property
    def is_right(self) -> bool:
        """Equal to what was expected, outer white space aside."""
        return self.text.strip() == self.question.expected.strip()


def answer_all(
    model: CausalLM,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Progress | None = None,
) -> tuple[Answer, ...]:
    """Greedy answers in the order of the questions.

    Questions of similar length are generated together, `batch_size` at a time; the answer to one
    does not depend on its neighbours.
    """
    prompts = [
        tokenizer.render(list(q.messages), add_generation_prompt=True).ids for q in questions
    ]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        found = generate(
            model, [list(prompts[i]) for i in rows], max_new_tokens=max_new_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        for row, ids in zip(rows, found, strict=True):
            kept = [i for i in ids if i not in tokenizer.stop_ids]
            texts[row] = tokenizer.decode(kept)
        if progress is not None:
            progress(start + len(rows), len(order))
    return tuple(Answer(q, t) for q, t in zip(questions, texts, strict=True))
