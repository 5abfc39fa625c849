"""One evaluation: base and adapter on the same held-out sets, and the gate.

Knows: recipes, the order of things. Does not know: how scores and bounds are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from trimtab.arch.load import load_arch
from trimtab.checkpoint.adapter import attach_adapter, load_adapter
from trimtab.checkpoint.base import require_base
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.source import open_source
from trimtab.config.data import ImageSection
from trimtab.config.evaluation import TaskSection
from trimtab.config.recipe import Recipe
from trimtab.data.image_source import message_images, thumbnail
from trimtab.data.prompt import ImageProcessor, load_image_processor
from trimtab.data.records import Record, read_records
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.errors import ConfigError, DataError
from trimtab.evaluate.compare import paired_difference
from trimtab.evaluate.nll import TextLoss, text_loss
from trimtab.evaluate.report import (
    EvalReport,
    Example,
    Role,
    SetReport,
    gate,
    score_answers,
    score_losses,
)
from trimtab.evaluate.tasks import Answer, Question, answer_all
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import disabled
from trimtab.train.reporter import ConsoleReporter, Reporter

COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_EXAMPLES = 5

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Bench:
    """A loaded model with what scoring needs."""

    model: CausalLM
    tokenizer: Tokenizer
    processor: ImageProcessor | None
    has_adapter: bool
    max_seq_len: int
    batch_tokens: int


def evaluate(
    recipe: Recipe, adapter: Path | None, reporter: Reporter | None = None, *,
    accept_base: str | None = None,
) -> EvalReport:
    """Score the sets of `recipe.evaluate` with the base and, where given, with the adapter.

    Args:
        recipe: names model, sets and gate.
        adapter: PEFT directory, or None for the base alone.
        reporter: None for stderr.
        accept_base: fingerprint of a base that may differ from the one the adapter names.

    Raises:
        ConfigError: TT103, the recipe names no held-out set.
        AdapterError: the adapter does not fit, or TT505 if it was trained on another base.
        DataError: a set is empty or its records do not fit the metric.
    """
    tasks = held_out_sets(recipe)
    if not tasks:
        raise ConfigError("TT103", "evaluate", "names no held-out set",
                          hint="add `evaluate: {domain: [{path: ...}], general: [{path: ...}]}`")
    say = ConsoleReporter() if reporter is None else reporter
    started = time.perf_counter()
    records = [_read(task) for _, task in tasks]
    bench = _load(recipe, adapter, say, accept_base)
    reports = []
    for (role, task), rows in zip(tasks, records, strict=True):
        score = _score_answers if task.kind == "generate" else _score_texts
        reports.append(score(bench, role, task, rows, say))
    judged = (
        gate(report, _limit(recipe, role, task))
        for report, (role, task) in zip(reports, tasks, strict=True)
    )
    return EvalReport(recipe.model.path, None if adapter is None else str(adapter),
                      tuple(reports), tuple(v for v in judged if v is not None),
                      time.perf_counter() - started)


def _limit(recipe: Recipe, role: Role, task: TaskSection) -> float:
    """What a set must gain, or may lose: its own limit, or that of the gate."""
    limits = recipe.evaluate.gate
    if role == "domain":
        return limits.min_domain_gain if task.min_gain is None else task.min_gain
    return limits.max_general_loss if task.max_loss is None else task.max_loss


def held_out_sets(recipe: Recipe) -> list[tuple[Role, TaskSection]]:
    """Domain sets, then general sets."""
    section = recipe.evaluate
    domain: list[tuple[Role, TaskSection]] = [("domain", task) for task in section.domain]
    return domain + [("general", task) for task in section.general]


def load_with_adapter(
    path: str, adapter: Path | None, *, base_dtype: str, compute_dtype: str, reporter: Reporter,
    ops: Mapping[str, str] | None = None, accept_base: str | None = None,
) -> CausalLM:
    """A model with an adapter injected and filled; `models.lora.disabled` gives the base.

    Raises:
        AdapterError: TT502, the adapter does not fit; TT505, it was trained on another base than
            this one or the one that `accept_base` names.
    """
    read = None
    if adapter is not None:
        source = open_source(path)
        read = load_adapter(adapter, load_arch(source.config(), source.where))
        require_base(read, source, str(adapter), accept=accept_base)
    compute = None if compute_dtype == "auto" else COMPUTE[compute_dtype]
    with reporter.progress("loading weights (%)") as update:
        model, _ = load_model(
            path, base_dtype=base_dtype, compute_dtype=compute, ops=ops,  # type: ignore[arg-type]
            progress=lambda done, total: update(100 * done // max(1, total), 100),
        )
    if read is not None:
        attach_adapter(model, read)
    return model


def _load(
    recipe: Recipe, adapter: Path | None, say: Reporter, accept_base: str | None
) -> _Bench:
    length = recipe.finetune
    tokenizer = load_tokenizer(recipe.model.path)
    processor = load_image_processor(recipe.model.path, length.data.image)
    model = load_with_adapter(
        recipe.model.path, adapter, base_dtype=length.base_dtype,
        compute_dtype=length.compute_dtype, reporter=say, ops=recipe.ops, accept_base=accept_base,
    )
    return _Bench(model, tokenizer, processor, adapter is not None, length.data.max_seq_len,
                  length.batch.micro_batch_tokens)


def _read(task: TaskSection) -> list[Record]:
    rows = []
    for record in read_records(Path(task.path)):
        rows.append(record)
        if task.limit is not None and len(rows) == task.limit:
            break
    if not rows:
        raise DataError("TT402", task.path, "has no record")
    return rows


def _score_answers(
    bench: _Bench, role: Role, task: TaskSection, rows: Sequence[Record], say: Reporter
) -> SetReport:
    questions = [_question(record) for record in rows]

    def run(progress: Progress) -> tuple[Answer, ...]:
        return answer_all(bench.model, bench.tokenizer, questions,
                          max_new_tokens=task.max_new_tokens, batch_tokens=bench.batch_tokens,
                          processor=bench.processor, progress=progress)

    before, after = _before_after(bench, task.name, run, say)
    right = [a.is_right for a in before]
    examples = tuple(
        Example(a.question.shown, a.question.expected, a.text, after[i].text if after else None,
                _pictures(a.question, bench.processor))
        for i, a in enumerate(before[:_EXAMPLES])
    )
    if after is None:
        return SetReport(task.name, role, "exact_match", len(rows), score_answers(right), None,
                         None, examples)
    right_after = [a.is_right for a in after]
    difference = paired_difference([float(r) for r in right], [float(r) for r in right_after])
    return SetReport(task.name, role, "exact_match", len(rows), score_answers(right),
                     score_answers(right_after), difference, examples)


def _score_texts(
    bench: _Bench, role: Role, task: TaskSection, rows: Sequence[Record], say: Reporter
) -> SetReport:
    texts = [_text(record) for record in rows]

    def run(progress: Progress) -> TextLoss:
        return text_loss(bench.model, bench.tokenizer, texts, max_seq_len=bench.max_seq_len,
                         batch_tokens=bench.batch_tokens, progress=progress)

    before, after = _before_after(bench, task.name, run, say)
    score = score_losses(before.bits, before.num_bytes)
    if after is None:
        return SetReport(task.name, role, "bits_per_byte", len(rows), score, None, None)
    weights = [float(n) for n in before.num_bytes]
    return SetReport(task.name, role, "bits_per_byte", len(rows), score,
                     score_losses(after.bits, after.num_bytes),
                     paired_difference(before.bits, after.bits, weights))


def _question(record: Record) -> Question:
    messages, answer = record.prompt_and_answer()
    return Question(messages, answer, record.where)


def _pictures(question: Question, processor: ImageProcessor | None) -> tuple[str, ...]:
    limits = ImageSection() if processor is None else processor.limits
    sources = message_images(question.messages)
    return tuple(thumbnail(source.read(limits.root, fetch=limits.fetch)) for source in sources)


def _text(record: Record) -> str:
    if record.text is None:
        raise DataError("TT401", record.where, "needs `text` to measure bits per byte of")
    return record.text


def _before_after(
    bench: _Bench, name: str, run: Callable[[Progress], T], say: Reporter
) -> tuple[T, T | None]:
    """The same scoring with the adapter switched off and on."""
    with disabled(bench.model), say.progress(f"{name}: base") as update:
        before = run(update)
    if not bench.has_adapter:
        return before, None
    with say.progress(f"{name}: adapter") as update:
        return before, run(update)
