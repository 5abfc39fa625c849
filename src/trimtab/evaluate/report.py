"""Evaluation reports: scores before and after, and the gate.

Knows: scores, differences, limits. Does not know: models, how scores were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from trimtab.evaluate.compare import Interval, paired_difference, wilson
from trimtab.verdict import Verdict

Role = Literal["domain", "general"]
Metric = Literal["exact_match", "bits_per_byte"]


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its answers, for people to read.

    Args:
        prompt: the last message.
        expected: the answer of the record.
        before: what the base said.
        after: what it said with the adapter, None without one.
        images: the images of the question, small, as data: URLs of PNG files.
    """

    prompt: str
    expected: str
    before: str
    after: str | None
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetReport:
    """Scores of one held-out set.

    Args:
        name: of the set.
        role: `domain` should rise, `general` should not fall.
        metric: `exact_match` (share, more is better) or `bits_per_byte` (less is better).
        num_records: records scored.
        before: the base model.
        after: with the adapter, None without one.
        difference: after - before over the same records.
        examples: a few answers.
    """

    name: str
    role: Role
    metric: Metric
    num_records: int
    before: Interval
    after: Interval | None
    difference: Interval | None
    examples: tuple[Example, ...] = ()

    @property
    def gain(self) -> Interval | None:
        """The difference, turned so that more is better."""
        if self.difference is None or self.metric == "exact_match":
            return self.difference
        d = self.difference
        return Interval(-d.value, -d.high, -d.low)


@dataclass(frozen=True, slots=True)
class EvalReport:
    """All sets of one evaluation, and the gate's verdicts (none without an adapter)."""

    model: str
    adapter: str | None
    sets: tuple[SetReport, ...]
    verdicts: tuple[Verdict, ...]
    wall_s: float

    @property
    def passed(self) -> bool:
        """Whether the adapter keeps every limit."""
        return all(v.passed for v in self.verdicts)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "passed": self.passed}


def score_answers(right: Sequence[bool]) -> Interval:
    """Share of right answers with its Wilson interval."""
    return wilson(sum(right), len(right))


def score_losses(bits: Sequence[float], num_bytes: Sequence[int]) -> Interval:
    """Bits per byte with its bootstrap interval over texts."""
    return paired_difference([0.0] * len(bits), bits, [float(n) for n in num_bytes])


def gate(report: SetReport, limit: float) -> Verdict | None:
    """Whether a set keeps its limit: the bound of its interval must, not only its middle.

    Args:
        report: of one set; without an adapter there is nothing to judge.
        limit: least gain of a domain set, or greatest loss of a general one.
    """
    gain = report.gain
    if gain is None:
        return None
    if report.role == "domain":
        name = f"{report.name} {report.metric} gain, lower 95% bound"
        return Verdict.at_least(name, gain.low, limit, report.name)
    name = f"{report.name} {report.metric} loss, upper 95% bound"
    return Verdict.at_most(name, -gain.low, limit, report.name)
