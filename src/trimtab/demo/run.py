"""The demo, assembled: one step per verb, then the table and the page.

Knows: the order of the verbs and the command line that stands for each. Does not know: how a verb
works (it is called as the command line calls it), how the page looks.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path

from rich.console import Console

from trimtab.arch.load import load_arch
from trimtab.arch.spec import ArchSpec
from trimtab.arch.summary import Summary, summarise
from trimtab.checkpoint.manifest import verify_files, write_atomic
from trimtab.checkpoint.merge import export_adapter
from trimtab.checkpoint.source import open_source
from trimtab.config.load import load_recipe
from trimtab.data.image_source import image_file, message_images, thumbnail
from trimtab.data.records import Record, read_records
from trimtab.demo.narrator import BarsAndWarnings, Found, Narrator, print_outcome
from trimtab.demo.outcome import Answers, Outcome, training_speed
from trimtab.demo.page import report_page
from trimtab.demo.promises import base_goals, promises
from trimtab.demo.settings import DEMO, Settings
from trimtab.demo.workspace import (
    Workspace,
    discard_artefact,
    packaged_base,
    place_file,
    prepare,
)
from trimtab.evaluate.answer import Speaker, user_message
from trimtab.evaluate.report import EvalReport
from trimtab.evaluate.run import evaluate
from trimtab.train.loop import RunResult, finetune
from trimtab.train.metrics import read_metrics
from trimtab.train.reporter import Reporter
from trimtab.train.run_dir import RunDirectory
from trimtab.units import format_bytes, format_count
from trimtab.verify.merged import merge_checked
from trimtab.verify.structure import check_structure

_NUM_STEPS = 9


def run_demo(
    out: Path,
    *,
    console: Console,
    settings: Settings = DEMO,
    base: Traversable | None = None,
    reporter: Reporter | None = None,
) -> Outcome:
    """Run every verb on the demo's model and write the page; continues an interrupted demo.

    Args:
        out: the demo's directory.
        console: where the story is told.
        settings: lengths, sizes and promises.
        base: checkpoint to start from; by default the one that comes with the package.
        reporter: of progress; None for stderr.

    Raises:
        TrimtabError: a directory holds something else, or a verb refuses its input.
    """
    started = time.perf_counter()
    place = Workspace(out)
    prepare(place, settings, packaged_base() if base is None else base)
    tell = Narrator(console, _NUM_STEPS)
    tell.say(f"base model, data and recipe are in {out}")
    demo = _Demo(place, settings, tell, BarsAndWarnings() if reporter is None else reporter)
    arch, summary = demo.inspect()
    demo.verify()
    before = demo.evaluate_base()
    training = demo.finetune()
    after = demo.evaluate_adapter(before)
    demo.merge()
    demo.export()
    answers = demo.generate(max(len(item.examples) for item in after.sets))
    metrics = tuple(read_metrics(RunDirectory(place.run).metrics))
    outcome = Outcome(
        out=str(out), summary=summary, vision=arch.vision, steps=tuple(tell.steps), training=training,
        tokens_per_second=training_speed(metrics), before=before, after=after,
        promises=promises(before, after, settings), answers=answers, metrics=metrics, files=_files(place), report=str(place.report),
        next_commands=_next_commands(place), seconds=time.perf_counter() - started,
    )
    write_atomic(place.report, report_page(outcome, settings).encode())
    write_atomic(place.results, (json.dumps(outcome.as_dict(), indent=1) + "\n").encode())
    print_outcome(console, outcome)
    return outcome


@dataclass(frozen=True, slots=True)
class _Demo:
    """The verbs, each with the line that does the same when typed."""

    place: Workspace
    settings: Settings
    tell: Narrator
    say: Reporter

    def inspect(self) -> tuple[ArchSpec, Summary]:
        def work() -> tuple[tuple[ArchSpec, Summary], Found]:
            source = open_source(self.place.base)
            arch = load_arch(source.config(), source.where)
            summary = summarise(arch)
            return (arch, summary), Found(_summary_lines(summary))

        return self.tell.step("What the model is", [_command("inspect", self.place.base)], work)

    def verify(self) -> None:
        base = self.place.base

        def structure() -> tuple[None, Found]:
            report = check_structure(base)
            lines = [f"{report.num_tensors:,} tensors held against config.json", *report.lines]
            return None, Found(lines, report.verdicts)

        def files() -> tuple[None, Found]:
            return None, Found((), verify_files(base))

        self.tell.step("Every tensor is there, in the right shape and dtype",
                       [_command("verify", "structure", base)], structure)
        self.tell.step("Every file is as it was written",
                       [_command("verify", "files", base)], files)

    def evaluate_base(self) -> EvalReport:
        place = self.place
        line = _command("evaluate", place.recipe, "--base-only", "--out", place.before)

        def work() -> tuple[EvalReport, Found]:
            report = evaluate(load_recipe(place.recipe), None, self.say)
            _write_report(place.before, report)
            return report, Found(_score_lines(report), base_goals(report, self.settings))

        return self.tell.step("The base before training", [line], work)

    def finetune(self) -> RunResult:
        def work() -> tuple[RunResult, Found]:
            result = finetune(load_recipe(self.place.recipe), self.say)
            return result, Found(_training_lines(result), result.verdicts)

        line = _command("finetune", self.place.recipe)
        return self.tell.step("Training a LoRA adapter on words, images and general text", [line], work)

    def evaluate_adapter(self, before: EvalReport) -> EvalReport:
        place = self.place
        line = _command("evaluate", place.recipe, "--out", place.after)

        def work() -> tuple[EvalReport, Found]:
            report = evaluate(load_recipe(place.recipe), place.adapter, self.say)
            _write_report(place.after, report)
            said = base_goals(before, self.settings)
            goals = [verdict for promise in promises(before, report, self.settings)
                     for verdict in promise.verdicts if verdict not in said]
            return report, Found(_score_lines(report), [*report.verdicts, *goals])

        return self.tell.step("Base against adapter", [line], work)

    def merge(self) -> None:
        place = self.place
        line = _command("merge", place.base, place.adapter, "--out", place.merged)

        def work() -> tuple[None, Found]:
            again = discard_artefact(place.merged)
            report = merge_checked(place.base, place.adapter, place.merged)
            return None, Found(_written(place.merged, again), report.verdicts)

        self.tell.step("Adapter folded into the base, and the result compared", [line], work)

    def export(self) -> None:
        place = self.place
        line = _command("export", place.adapter, "--to", "peft", "--out", place.peft)

        def work() -> tuple[None, Found]:
            again = discard_artefact(place.peft)
            export_adapter(place.adapter, place.peft)
            return None, Found(_written(place.peft, again), verify_files(place.peft))

        self.tell.step("Adapter exported for PEFT", [line], work)

    def generate(self, shown: int) -> tuple[Answers, ...]:
        place, settings = self.place, self.settings
        # The page shows the first few with the evaluation; these follow them.
        words = islice(read_records(place.data("domain_heldout")), shown,
                       shown + settings.num_prompts)
        pictures = islice(read_records(place.data("digits_name_heldout")), shown,
                          shown + settings.num_images)
        asked = [_question(place, record) for record in (*words, *pictures)]
        lines = [
            _command("generate", place.base, "--adapter", place.adapter, "--compare",
                     "--max-new-tokens", settings.max_new_tokens,
                     *(word for image in question.images for word in ("--image", image)),
                     "--prompt", question.prompt)
            for question in asked
        ]

        def work() -> tuple[tuple[Answers, ...], Found]:
            speaker = Speaker.load(str(place.base), place.adapter, base_dtype="bf16",
                                   max_new_tokens=settings.max_new_tokens, raw=False)
            answers = tuple(_answer(speaker, question) for question in asked)
            pairs = [f"{a.prompt!r}{' and an image' if a.images else ''}  "
                     f"base: {a.base!r}  adapter: {a.adapter!r}" for a in answers]
            return answers, Found(pairs)

        title = "Words and an image that training never saw, side by side"
        return self.tell.step(title, lines, work)


@dataclass(frozen=True, slots=True)
class _Question:
    """A held-out record as it is typed: text, and images in files."""

    prompt: str
    images: tuple[Path, ...]
    expected: str


def _question(place: Workspace, record: Record) -> _Question:
    """Its images are written where a command can name them."""
    messages, expected = record.prompt_and_answer()
    line = record.where.rsplit(":", 1)[-1]
    paths = []
    for number, source in enumerate(message_images(messages)):
        assert source.data is not None, "the demo's records hold their images"
        path = place.images / f"heldout-{line}{f'-{number}' if number else ''}.png"
        place_file(path, source.data)
        paths.append(path)
    content = messages[-1]["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "".join(str(part["text"]) for part in parts if "text" in part)
    return _Question(text, tuple(paths), expected)


def _answer(speaker: Speaker, question: _Question) -> Answers:
    messages = [user_message(question.prompt, question.images)]
    base, adapter = (
        "".join(speaker.stream(messages, use_adapter=use)) for use in (False, True)
    )
    pictures = tuple(thumbnail(image_file(path).read()) for path in question.images)
    return Answers(question.prompt, question.expected, base, adapter, pictures)


def _command(*words: object) -> str:
    return shlex.join(["trimtab", *(str(word) for word in words)])


def _write_report(path: Path, report: EvalReport) -> None:
    write_atomic(path, (json.dumps(report.as_dict()) + "\n").encode())


def _summary_lines(summary: Summary) -> list[str]:
    layers = summary.layers
    mixers = ", ".join(f"{sum(x.mixer == kind for x in layers)} {kind.upper()}"
                       for kind in dict.fromkeys(x.mixer for x in layers))
    ffns = ", ".join(f"{sum(x.ffn == kind for x in layers)} {kind}"
                     for kind in dict.fromkeys(x.ffn for x in layers))
    active = format_count(summary.active_parameters_per_token)
    return [
        f"{summary.name}: {format_count(summary.total_parameters)} parameters, "
        f"{active} active per token, {format_bytes(summary.stored_bytes)} as stored",
        f"{len(layers)} layers: {mixers}; {ffns}",
        *summary.unusual,
    ]


def _score_lines(report: EvalReport) -> list[str]:
    lines = []
    for item in report.sets:
        after = "" if item.after is None else f" -> {item.after.value:.4f}"
        lines.append(f"{item.name}: {item.metric} {item.before.value:.4f}{after} "
                     f"on {item.num_records} records")
    return lines


def _training_lines(result: RunResult) -> list[str]:
    if result.was_finished:
        return [f"finished earlier: {result.steps} steps; the adapter is {result.adapter}"]
    resumed = f", continued after step {result.resumed_from}" if result.resumed_from else ""
    return [
        f"{result.steps} steps{resumed}: loss {result.first_loss:.3f} -> {result.last_loss:.3f}, "
        f"{result.tokens_per_second:,.0f} tokens/s, peak memory {result.peak_memory_gib:.2f} GiB",
        f"{result.trainable_parameters:,} trainable parameters, "
        f"{result.trainable_share:.2%} of the base",
    ]


def _written(directory: Path, again: bool) -> list[str]:
    size = format_bytes(sum(p.stat().st_size for p in directory.iterdir()))
    return [f"{size} in {directory}{', in place of an earlier one' if again else ''}"]


def _files(place: Workspace) -> dict[str, int]:
    """Files and directories of the demo with their bytes, in the order they were made."""
    paths = [place.base, place.root / "data", place.recipe, place.before, place.run, place.after,
             place.merged, place.peft]
    return {str(path): _size(path) for path in paths}


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


def _next_commands(place: Workspace) -> tuple[str, ...]:
    return (
        _command("generate", place.base, "--adapter", place.adapter, "--compare", "--interactive"),
        _command("data", "preview", place.recipe),
        _command("finetune", place.recipe, "--set", "finetune.lora.rank=8", "--set",
                 f"output={place.root / 'run-rank-8'}"),
        _command("inspect", "kimi-k3"),
    )
