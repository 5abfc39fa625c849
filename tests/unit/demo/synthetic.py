"""A demo's outcome made of invented numbers."""

from __future__ import annotations

import math

from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.summary import summarise
from trimtab.demo.outcome import Answers, Outcome, Step
from trimtab.evaluate.compare import Interval
from trimtab.evaluate.report import EvalReport, Example, SetReport
from trimtab.train.loop import RunResult
from trimtab.verdict import Verdict

NASTY = "<script>alert('x')</script> & co"


def metrics_rows(steps: int) -> list[dict[str, object]]:
    """Rows as finetune writes them."""
    return [
        {
            "step": i + 1, "loss": 3 * math.exp(-i / 10) + 0.4, "lr": 2e-3 * (1 - i / steps),
            "grad_norm": 1.0 + 1 / (i + 1), "tokens": 4096, "domain_share": 0.8,
            "tokens_per_second": 4096.0, "step_time_s": 1.0,
            "router_max_over_mean": {str(layer): 1.5 + layer / 10 for layer in range(1, 8)},
        }
        for i in range(steps)
    ]


def outcome(*, after: float = 0.6, general: float = 2.1, steps: int = 20) -> Outcome:
    """An outcome whose base scores 0.03 and 2.1 bits per byte."""
    rows = (
        SetReport("lemmas", "domain", "exact_match", 500, _interval(0.03), _interval(after),
                  _interval(after - 0.03), (Example("lemma: mice", "mouse", NASTY, "mouse"),)),
        SetReport("documentation", "general", "bits_per_byte", 116, _interval(2.1),
                  _interval(general), _interval(general - 2.1)),
    )
    base_only = tuple(
        SetReport(s.name, s.role, s.metric, s.num_records, s.before, None, None) for s in rows
    )
    verdict = Verdict.at_least("domain exact match after", after, 0.4)
    return Outcome(
        out="runs/demo", summary=summarise(load_arch(preset_config("k3.1-tiny"), "preset")),
        steps=(
            Step("What the model is", ("trimtab inspect runs/demo/base",), (), (), 0.1),
            Step("Base against adapter", ("trimtab evaluate runs/demo/recipe.yaml",), (),
                 (verdict,), 12.0),
        ),
        training=RunResult("runs/demo/run", "runs/demo/run/adapter", steps, 0, False, 3.4, 0.4,
                           4096.0, 20.0, 0.9, 400_384, 0.15, ()),
        tokens_per_second=4096.0, before=EvalReport("base", None, base_only, (), 1.0),
        after=EvalReport("base", "adapter", rows, (), 2.0),
        answers=(Answers("lemma: geese", "goose", "", "goose"),),
        metrics=tuple(metrics_rows(steps)), files={"runs/demo/base": 4_000_000},
        report="runs/demo/report.html", next_commands=("trimtab inspect kimi-k3",), seconds=100.0,
    )


def _interval(value: float) -> Interval:
    return Interval(value, value - 0.01, value + 0.01)
