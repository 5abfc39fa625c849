"""What a demo found, as values.

Knows: fields and their JSON form. Does not know: how they were found or are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trimtab.arch.spec import AxialVisionSpec, VisionSpec
from trimtab.arch.summary import Summary
from trimtab.demo.promises import Promise
from trimtab.evaluate.report import EvalReport
from trimtab.train.loop import RunResult
from trimtab.verdict import Verdict

_JSON_KEYS = {
    "words": "domain_exact_match", "digits named": "image_exact_match",
    "documentation": "general_bits_per_byte", "digits read": "image_old_skill",
}  # fmt: skip


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
    """One question with both answers.

    Args:
        prompt: what is asked.
        expected: the right answer.
        base, adapter: what they said.
        images: pictures of the question, as data: URLs.
    """

    prompt: str
    expected: str
    base: str
    adapter: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything the closing table and the page show.

    Args:
        out: the demo's directory.
        summary: of the base model.
        vision: its tower and projector, None without.
        steps: verbs in the order they ran.
        training: result of finetune.
        tokens_per_second: over all steps of the run, pads included.
        before, after: evaluation of the base, and of base and adapter.
        promises: what the demo promises of these, in the order of the evaluation.
        answers: held-out prompts with both answers.
        metrics: rows of metrics.jsonl.
        files: path to bytes of what was written.
        report: path of the page.
        next_commands: what to type next.
        seconds: wall time of all.
    """

    out: str
    summary: Summary
    vision: VisionSpec | AxialVisionSpec | None
    steps: tuple[Step, ...]
    training: RunResult
    tokens_per_second: float
    before: EvalReport
    after: EvalReport
    promises: tuple[Promise, ...]
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

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        scores = {_JSON_KEYS[promise.name]: promise.as_dict() for promise in self.promises}
        return {
            "passed": self.passed,
            "out": self.out,
            "seconds": round(self.seconds, 2),
            **scores,
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


def training_speed(metrics: Sequence[Mapping[str, object]]) -> float:
    """Tokens per second over all rows of metrics.jsonl, whatever start they are from."""
    tokens = sum(float(str(row["tokens"])) for row in metrics)
    seconds = sum(float(str(row["step_time_s"])) for row in metrics)
    return tokens / seconds if seconds > 0 else 0.0
