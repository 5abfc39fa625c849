"""The `evaluate` section: held-out sets, how they are scored, and the gate.

Knows: keys, defaults, which metric goes with which kind. Does not know: how scores are computed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from trimtab.config.fields import Number, PositiveInt, Section, Word, fault

Metric = Literal["exact_match", "bits_per_byte"]
Kind = Literal["generate", "loss"]
_METRIC_OF_KIND: dict[Kind, Metric] = {"generate": "exact_match", "loss": "bits_per_byte"}


class TaskSection(Section):
    """One held-out set.

    Attributes:
        name: how reports call it; the file's name where left out.
        path: JSONL file, same records as for training.
        kind: `generate` an answer and compare it (domain sets by default), or measure the `loss`
            of the text (general sets by default).
        metric: `exact_match` of generated answers, `bits_per_byte` of text; follows from `kind`.
        max_new_tokens: longest generated answer.
        limit: use only the first records.
        min_gain: in place of the gate's `min_domain_gain` for this set.
        max_loss: in place of the gate's `max_general_loss` for this set.
    """

    name: Word
    path: Word
    kind: Kind
    metric: Metric
    max_new_tokens: PositiveInt = 64
    limit: PositiveInt | None = None
    min_gain: Number | None = None
    max_loss: Number | None = None

    @model_validator(mode="after")
    def _pair(self) -> TaskSection:
        if _METRIC_OF_KIND[self.kind] != self.metric:
            raise fault("TT105", "metric", f"must be {_METRIC_OF_KIND[self.kind]} for this kind")
        return self


def _with_task_defaults(kind: Kind) -> BeforeValidator:
    """Fill name, kind and metric of a task; a plain string is its path."""

    def fill(value: object) -> object:
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, dict):
            return value
        filled = dict(value)
        filled.setdefault("kind", kind)
        for name, metric in _METRIC_OF_KIND.items():
            if filled["kind"] == name:
                filled.setdefault("metric", metric)
        if isinstance(filled.get("path"), str):
            stem = filled["path"].rsplit("/", 1)[-1].split(".", 1)[0]
            filled.setdefault("name", stem or "task")
        return filled

    return BeforeValidator(fill)


class GateSection(Section):
    """Limits an adapter must keep, each compared with its confidence bound.

    Attributes:
        min_domain_gain: least improvement of a domain set, in units of its metric.
        max_general_loss: greatest deterioration of a general set, in units of its metric.
    """

    min_domain_gain: Number = 0.0
    max_general_loss: Number = 0.01


class EvaluateSection(Section):
    """Held-out sets and the gate; empty lists evaluate nothing.

    Attributes:
        domain: sets of the new task; a plain path is a set whose answers are generated.
        general: sets that must not suffer; a plain path is a set whose loss is measured.
        gate: limits.
    """

    domain: tuple[Annotated[TaskSection, _with_task_defaults("generate")], ...] = ()
    general: tuple[Annotated[TaskSection, _with_task_defaults("loss")], ...] = ()
    gate: GateSection = GateSection()
