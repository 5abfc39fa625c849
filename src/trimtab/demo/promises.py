"""What the demo promises: two skills learned, two kept.

Knows: the names of the recipe's held-out sets, limits. Does not know: how scores are made or shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.demo.settings import Settings
from trimtab.evaluate.report import EvalReport, Example, Metric, Role
from trimtab.verdict import Verdict

TITLES = {
    "words": "words: answered with the lemma",
    "digits named": "digits in an image: named in words",
    "documentation": "documentation: text continued",
    "digits read": "digits in an image: read in figures",
}
"""The recipe's held-out sets, in words."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One held-out set before and after, with its limits.

    Args:
        name: of the set.
        role: `domain` is learned, `general` is kept.
        metric: of the scores.
        records: held-out records.
        before, after: scores of the base, and with the adapter.
        limit: what is promised, in words.
        verdicts: the same as checks; those of a new skill begin with one of the base alone.
        examples: a few questions and answers.
    """

    name: str
    role: Role
    metric: Metric
    records: int
    before: float
    after: float
    limit: str
    verdicts: tuple[Verdict, ...]
    examples: tuple[Example, ...]

    @property
    def title(self) -> str:
        """What the set asks, in words."""
        return TITLES[self.name]

    @property
    def passed(self) -> bool:
        """Whether it is kept."""
        return all(verdict.passed for verdict in self.verdicts)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {"before": self.before, "after": self.after, "change": self.after - self.before,
                "records": self.records, "passed": self.passed}


def base_goals(before: EvalReport, settings: Settings) -> tuple[Verdict, ...]:
    """The base cannot do the new tasks yet."""
    return tuple(
        _unknown(item.name, item.before.value, settings)
        for item in before.sets if item.role == "domain"
    )


def promises(before: EvalReport, after: EvalReport, settings: Settings) -> tuple[Promise, ...]:
    """One per held-out set.

    Args:
        before: evaluation of the base.
        after: evaluation of base and adapter on the same sets.
        settings: limits.
    """
    found = []
    for base, item in zip(before.sets, after.sets, strict=True):
        assert item.after is not None, "the second evaluation has an adapter"
        old, new = base.before.value, item.after.value
        limit, verdicts = _judge(item.name, old, new, settings)
        found.append(Promise(item.name, item.role, item.metric, item.num_records, old, new, limit,
                             verdicts, item.examples))
    return tuple(found)


def _judge(
    name: str, old: float, new: float, settings: Settings
) -> tuple[str, tuple[Verdict, ...]]:
    """The limit of a set in words, and its checks."""
    learned = {"words": settings.min_words, "digits named": settings.min_named}
    if name in learned:
        least = learned[name]
        return f"before <= {settings.max_before:.2f}, after >= {least:.2f}", (
            _unknown(name, old, settings),
            Verdict.at_least(f"{name}: exact match after", new, least),
        )
    if name == "documentation":
        most = settings.max_general_rise
        rise = Verdict.at_most(f"{name}: bits per byte, after minus before", new - old, most)
        return f"at most {most:+.2f}", (rise,)
    most = settings.max_read_loss
    loss = Verdict.at_most(f"{name}: exact match, before minus after", old - new, most)
    return f"at least {-most:+.2f}", (loss,)


def _unknown(name: str, score: float, settings: Settings) -> Verdict:
    return Verdict.at_most(f"{name}: exact match before", score, settings.max_before)
