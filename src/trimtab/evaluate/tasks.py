"""Exact match: the model answers each conversation greedily, and an answer is right or not.

Knows: conversations, generation, comparison of strings. Does not know: recipes, adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trimtab.data.tokenizer import Tokenizer
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate

Progress = Callable[[int, int], None]
Message = Mapping[str, object]


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
    batch_tokens: int,
    progress: Progress | None = None,
) -> tuple[Answer, ...]:
    """Greedy answers in the order of the questions.

    Args:
        model: as it is, adapters included.
        tokenizer: of the checkpoint.
        questions: conversations to answer.
        max_new_tokens: longest answer.
        batch_tokens: questions of similar length are generated together, as many as keep prompts
            and answers within this; the answer to one does not depend on its neighbours.
        progress: told (questions done, questions in all).
    """
    prompts = [
        tokenizer.render(list(q.messages), add_generation_prompt=True).token_ids for q in questions
    ]
    texts = [""] * len(prompts)
    done = 0
    for rows in _groups([len(p) + max_new_tokens for p in prompts], batch_tokens):
        found = generate(
            model, [prompts[i] for i in rows], max_new_tokens=max_new_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        for row, ids in zip(rows, found, strict=True):
            texts[row] = tokenizer.decode(ids)
        done += len(rows)
        if progress is not None:
            progress(done, len(prompts))
    return tuple(Answer(q, t) for q, t in zip(questions, texts, strict=True))


def _groups(sizes: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices, shortest first, cut where the sum of sizes would exceed the budget."""
    group: list[int] = []
    total = 0
    for index in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        if group and total + sizes[index] > budget:
            yield group
            group, total = [], 0
        group.append(index)
        total += sizes[index]
    if group:
        yield group
