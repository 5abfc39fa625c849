"""report.html: the demo's page, one file that needs no network.

Knows: which numbers go into which chart. Does not know: geometry and style (`report`), how the
numbers came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from trimtab.demo.outcome import Answers, Outcome, goal_verdicts, only_set
from trimtab.demo.settings import Settings
from trimtab.report.axis import smooth
from trimtab.report.charts import Bar, HeatRow, Series, bar_chart, heat_map, line_chart
from trimtab.report.page import render
from trimtab.units import format_bytes, format_count, format_seconds

_SAMPLED_ROWS = 12
Rows = Sequence[Mapping[str, object]]


def report_page(outcome: Outcome, settings: Settings) -> str:
    """The page as HTML text."""
    goals = goal_verdicts(outcome.before, outcome.after, settings)
    context = {
        "outcome": outcome,
        "settings": settings,
        "goals": goals,
        "exact": outcome.exact_match,
        "bits": outcome.bits_per_byte,
        "words": only_set(outcome.after, "domain").num_records,
        "tiles": _tiles(outcome),
        "exact_chart": _exact_chart(outcome, settings),
        "bits_chart": _bits_chart(outcome, settings),
        "curves": _curves(outcome.metrics),
        "router_chart": _router_chart(outcome.metrics),
        "sampled": _sampled(outcome.metrics),
        "answers": _answers(outcome),
        "bytes": format_bytes,
        "count": format_count,
        "time": format_seconds,
    }
    return render("trimtab.demo", "report.html.j2", context)


def _tiles(outcome: Outcome) -> list[tuple[str, str]]:
    training = outcome.training
    return [
        (f"{training.trainable_share:.2%}", "of the parameters trained"),
        (f"{training.peak_memory_gib:.2f} GiB", "peak memory"),
        (f"{outcome.tokens_per_second:,.0f}", "training tokens per second"),
        (format_seconds(outcome.seconds),
         "for this start of the demo" if training.resumed_from else "for the whole demo"),
    ]


def _exact_chart(outcome: Outcome, settings: Settings) -> Markup:
    base, adapter = outcome.exact_match
    label = f"Exact match rises from {base:.3f} with the base to {adapter:.3f} with the adapter"
    return bar_chart(label, [
        Bar("base", base, f"{base:.3f}", settings.max_before,
            f"at most {settings.max_before:.2f}", "muted"),
        Bar("adapter", adapter, f"{adapter:.3f}", settings.min_after,
            f"at least {settings.min_after:.2f}"),
    ], top=1.0)


def _bits_chart(outcome: Outcome, settings: Settings) -> Markup:
    base, adapter = outcome.bits_per_byte
    limit = base + settings.max_general_rise
    label = f"Bits per byte of general text: {base:.4f} with the base, {adapter:.4f} with the adapter"
    return bar_chart(label, [
        Bar("base", base, f"{base:.4f}", style="muted"),
        Bar("adapter", adapter, f"{adapter:.4f}", limit, f"at most {limit:.4f}"),
    ], top=1.15 * max(base, adapter))


def _curves(metrics: Rows) -> list[tuple[str, str, Markup]]:
    """Title, remark and chart of each curve."""
    loss, speed = _column(metrics, "loss"), _column(metrics, "tokens_per_second")
    steps = _column(metrics, "step")
    fall = f"Loss falls from {loss[0]:.3f} to {loss[-1]:.3f} over {len(loss)} steps" if loss else ""
    return [
        ("Loss", "nats per supervised token; smoothed, single steps behind",
         _noisy(fall or "Loss", steps, loss)),
        ("Learning rate", "warm-up, then cosine",
         _schedule("Learning rate by step", steps, _column(metrics, "lr"))),
        ("Gradient norm", "before clipping at 1",
         _noisy("Gradient norm by step", steps, _column(metrics, "grad_norm"))),
        ("Speed", "tokens per second, pads included",
         _noisy("Tokens per second by step", steps, speed)),
        ("Mixture", "share of the tokens that are words, the rest is general text",
         _noisy("Share of domain tokens by step", steps, _column(metrics, "domain_share"))),
    ]


def _noisy(label: str, steps: Sequence[float], values: Sequence[float]) -> Markup:
    raw = Series(list(zip(steps, values, strict=True)), "faint")
    line = Series(list(zip(steps, smooth(values), strict=True)))
    return line_chart(label, [raw, line], x_name="step")


def _schedule(label: str, steps: Sequence[float], values: Sequence[float]) -> Markup:
    # Its last value is next to nothing and says less than the curve.
    curve = Series(list(zip(steps, values, strict=True)), shows_last=False)
    return line_chart(label, [curve], x_name="step")


def _router_chart(metrics: Rows) -> Markup | None:
    """Load of each MoE layer's busiest expert over training; None without such layers."""
    by_layer: dict[str, list[float]] = {}
    for row in metrics:
        loads = row["router_max_over_mean"]
        assert isinstance(loads, Mapping), "finetune writes one load per layer"
        for layer, load in loads.items():
            by_layer.setdefault(str(layer), []).append(float(load))
    if not by_layer:
        return None
    highest = max(max(values) for values in by_layer.values())
    label = "Load of the busiest expert over the mean, per layer and step; " + "; ".join(
        f"layer {layer} ends at {values[-1]:.2f}" for layer, values in by_layer.items()
    )
    rows = [HeatRow(f"layer {layer}", values) for layer, values in by_layer.items()]
    return heat_map(label, rows, low=1.0, high=max(2.0, highest), x_name="step")


def _sampled(metrics: Rows) -> list[dict[str, str]]:
    """A dozen steps in numbers, the last one among them."""
    every = max(1, -(-len(metrics) // _SAMPLED_ROWS))
    chosen = list(metrics[::every])
    if metrics and chosen[-1] is not metrics[-1]:
        chosen.append(metrics[-1])
    return [
        {
            "step": f"{_number(row, 'step'):.0f}",
            "loss": f"{_number(row, 'loss'):.4f}",
            "lr": f"{_number(row, 'lr'):.2e}",
            "grad norm": f"{_number(row, 'grad_norm'):.3f}",
            "tokens/s": f"{_number(row, 'tokens_per_second'):,.0f}",
        }
        for row in chosen
    ]


def _answers(outcome: Outcome) -> list[Answers]:
    evaluated = [
        Answers(e.prompt, e.expected, e.before, e.after or "")
        for e in only_set(outcome.after, "domain").examples
    ]
    return [*evaluated, *outcome.answers]


def _column(metrics: Rows, name: str) -> list[float]:
    return [_number(row, name) for row in metrics]


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row[name]))
