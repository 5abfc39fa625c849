"""What a demo found, as values.

Knows: fields and their JSON form. Does not know: how they were found or are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trimtab.arch.summary import Summary
from trimtab.demo.settings import Settings
from trimtab.evaluate.report import EvalReport, SetReport
from trimtab.train.loop import RunResult
from trimtab.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Step:
    """One verb as it ran.

    Args:
        title: what it does, in words.
        commands: lines that do the same when typed.
        lines: what it found.
        verdicts: checks.
        seconds: wall time.
    """

    title: str
    commands: tuple[str, ...]
    lines: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(verdict.passed for verdict in self.verdicts)


@dataclass(frozen=True, slots=True)
class Answers:
    """One prompt with both answers."""

    prompt: str
    expected: str
    base: str
    adapter: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything the closing table and the page show.

    Args:
        out: the demo's directory.
        summary: of the base model.
        steps: verbs in the order they ran.
        training: result of finetune.
        tokens_per_second: over all steps of the run, pads included.
        before, after: evaluation of the base, and of base and adapter.
        answers: held-out prompts with both answers.
        metrics: rows of metrics.jsonl.
        files: path to bytes of what was written.
        report: path of the page.
        next_commands: what to type next.
        seconds: wall time of all.
    """

    out: str
    summary: Summary
    steps: tuple[Step, ...]
    training: RunResult
    tokens_per_second: float
    before: EvalReport
    after: EvalReport
    answers: tuple[Answers, ...]
    metrics: tuple[Mapping[str, object], ...]
    files: Mapping[str, int]
    report: str
    next_commands: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check of every step passed."""
        return all(step.passed for step in self.steps)

    @property
    def exact_match(self) -> tuple[float, float]:
        """Share of held-out words answered exactly, before and after."""
        return scores(self.before, self.after, "domain")

    @property
    def bits_per_byte(self) -> tuple[float, float]:
        """Of held-out general text, before and after."""
        return scores(self.before, self.after, "general")

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        exact, bits = self.exact_match, self.bits_per_byte
        return {
            "passed": self.passed,
            "out": self.out,
            "seconds": round(self.seconds, 2),
            "domain_exact_match": {
                "before": exact[0], "after": exact[1],
                "records": only_set(self.after, "domain").num_records,
            },
            "general_bits_per_byte": {
                "before": bits[0], "after": bits[1], "change": bits[1] - bits[0],
                "records": only_set(self.after, "general").num_records,
            },
            "trainable_parameters": self.training.trainable_parameters,
            "trainable_share": self.training.trainable_share,
            "training_steps": self.training.steps,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_gib": self.training.peak_memory_gib,
            "verdicts": [v.as_dict() for step in self.steps for v in step.verdicts],
            "steps": [{**asdict(step), "passed": step.passed} for step in self.steps],
            "answers": [asdict(answer) for answer in self.answers],
            "files": dict(self.files),
            "report": self.report,
            "next": list(self.next_commands),
        }


def only_set(report: EvalReport, role: str) -> SetReport:
    """The one set of `domain` or `general` that the demo's recipe names."""
    (found,) = (item for item in report.sets if item.role == role)
    return found


def scores(before: EvalReport, after: EvalReport, role: str) -> tuple[float, float]:
    """Score of a set in the first and, with the adapter, in the second evaluation."""
    adapted = only_set(after, role).after
    assert adapted is not None, "the second evaluation has an adapter"
    return only_set(before, role).before.value, adapted.value


def base_goal(before: EvalReport, settings: Settings) -> Verdict:
    """The base cannot do the task yet."""
    score = only_set(before, "domain").before.value
    return Verdict.at_most("domain exact match before", score, settings.max_before)


def goal_verdicts(before: EvalReport, after: EvalReport, settings: Settings) -> tuple[Verdict, ...]:
    """The demo's three promises: the base, the adapter, and what general text may lose."""
    exact, bits = scores(before, after, "domain"), scores(before, after, "general")
    rise = "general bits per byte, after minus before"
    return (
        base_goal(before, settings),
        Verdict.at_least("domain exact match after", exact[1], settings.min_after),
        Verdict.at_most(rise, bits[1] - bits[0], settings.max_general_rise),
    )


def training_speed(metrics: Sequence[Mapping[str, object]]) -> float:
    """Tokens per second over all rows of metrics.jsonl, whatever start they are from."""
    tokens = sum(float(str(row["tokens"])) for row in metrics)
    seconds = sum(float(str(row["step_time_s"])) for row in metrics)
    return tokens / seconds if seconds > 0 else 0.0
