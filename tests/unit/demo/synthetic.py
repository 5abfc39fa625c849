"""A demo's outcome made of invented numbers."""

from __future__ import annotations

import math

from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.summary import summarise
from trimtab.demo.outcome import Answers, Outcome, Step
from trimtab.demo.promises import promises
from trimtab.demo.settings import DEMO
from trimtab.evaluate.compare import Interval
from trimtab.evaluate.report import EvalReport, Example, SetReport
from trimtab.train.loop import RunResult

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


PIXEL = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAA"
         "AABJRU5ErkJggg==")


def reports(
    *, words: float = 0.6, named: float = 0.9, general: float = 2.1, read: float = 0.85
) -> tuple[EvalReport, EvalReport]:
    """Evaluations before (0.03, 0.0, 2.1 bits per byte, 0.85) and after."""
    rows = (
        SetReport("words", "domain", "exact_match", 500, _interval(0.03), _interval(words),
                  _interval(words - 0.03), (Example("lemma: mice", "mouse", NASTY, "mouse"),)),
        SetReport("digits named", "domain", "exact_match", 300, _interval(0.0), _interval(named),
                  _interval(named),
                  (Example("[image] name:", "seven", NASTY, "seven", (PIXEL,)),)),
        SetReport("documentation", "general", "bits_per_byte", 116, _interval(2.1),
                  _interval(general), _interval(general - 2.1)),
        SetReport("digits read", "general", "exact_match", 300, _interval(0.85), _interval(read),
                  _interval(read - 0.85), (Example("[image] read:", "7", "7", "7", (PIXEL,)),)),
    )
    base_only = tuple(
        SetReport(s.name, s.role, s.metric, s.num_records, s.before, None, None) for s in rows
    )
    return (EvalReport("base", None, base_only, (), 1.0),
            EvalReport("base", "adapter", rows, (), 2.0))


def outcome(*, steps: int = 20, words: float = 0.6, read: float = 0.85) -> Outcome:
    """An outcome; by default every promise is kept."""
    before, after = reports(words=words, read=read)
    arch = load_arch(preset_config("k3.1-tiny"), "preset")
    found = promises(before, after, DEMO)
    return Outcome(
        out="runs/demo", summary=summarise(arch), vision=arch.vision,
        steps=(
            Step("What the model is", ("trimtab inspect runs/demo/base",), (), (), 0.1),
            Step("Base against adapter", ("trimtab evaluate runs/demo/recipe.yaml",), (),
                 tuple(verdict for promise in found for verdict in promise.verdicts), 12.0),
        ),
        training=RunResult("runs/demo/run", "runs/demo/run/adapter", steps, 0, False, False, 3.4, 0.4,
                           4096.0, 20.0, 0.9, 400_384, 0.15, ()),
        tokens_per_second=4096.0, before=before, after=after, promises=found,
        answers=(Answers("lemma: geese", "goose", "", "goose"),
                 Answers("name:", "one two", "12", "one two", (PIXEL,))),
        metrics=tuple(metrics_rows(steps)), files={"runs/demo/base": 4_000_000},
        report="runs/demo/report.html", next_commands=("trimtab inspect kimi-k3",), seconds=100.0,
    )


def _interval(value: float) -> Interval:
    return Interval(value, value - 0.01, value + 0.01)
