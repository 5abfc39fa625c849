"""Exact match: the model answers each conversation greedily, and an answer is right or not.

Knows: conversations with images, generation, comparison of strings. Does not know: recipes, adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.data.image_source import image_sources, message_images
from trimtab.data.prompt import ImageProcessor, Prompt, build_prompt
from trimtab.data.tokenizer import Tokenizer
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate
from trimtab.train.batch import image_batch

Progress = Callable[[int, int], None]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation without its last assistant message, and that message.

    Args:
        messages: what the model sees.
        expected: the answer.
        where: `file:line` of the record.
    """

    messages: tuple[Message, ...]
    expected: str
    where: str = "question"

    @property
    def shown(self) -> str:
        """The last message; an image in it is a word in brackets."""
        if not self.messages:
            return ""
        content = self.messages[-1]["content"]
        if not isinstance(content, list | tuple):
            return str(content)
        images = "[image] " * len(image_sources(self.messages[-1]))
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return images + "".join(text for text in texts if isinstance(text, str))


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
    processor: ImageProcessor | None = None,
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
        processor: of the checkpoint's images; None for a model of text only.
        progress: told (questions done, questions in all).

    Raises:
        DataError: TT404, TT406, TT407 for a question that cannot be asked.
    """
    # Pixels of all questions together may be many times the tokens: they are read again below.
    prompts = [replace(_prompt(q, tokenizer, processor), images=()) for q in questions]
    texts = [""] * len(prompts)
    done = 0
    for group in _groups([len(p.token_ids) + max_new_tokens for p in prompts], batch_tokens):
        images, rows, begin = [], [], 0
        for index in group:
            if processor is not None:
                images += [processor.read(s) for s in message_images(questions[index].messages)]
            rows += [begin + row for row in prompts[index].image_rows]
            begin += len(prompts[index].token_ids)
        found = generate(
            model, [prompts[i].token_ids for i in group], max_new_tokens=max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            images=image_batch(images, rows, model.embed.weight.device),
        )
        for index, ids in zip(group, found, strict=True):
            texts[index] = tokenizer.read_answer(ids).content
        done += len(group)
        if progress is not None:
            progress(done, len(prompts))
    return tuple(Answer(q, t) for q, t in zip(questions, texts, strict=True))


def _prompt(question: Question, tokenizer: Tokenizer, processor: ImageProcessor | None) -> Prompt:
    return build_prompt(question.messages, tokenizer, processor, where=question.where,
                        add_generation_prompt=True)


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
