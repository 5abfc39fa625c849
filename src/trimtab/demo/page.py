"""report.html: the demo's page, one file that needs no network.

Knows: which numbers go into which chart. Does not know: geometry and style (`report`), how the
numbers came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from trimtab.demo.outcome import Answers, Outcome
from trimtab.demo.promises import Promise
from trimtab.demo.settings import Settings
from trimtab.report.axis import smooth
from trimtab.report.charts import Bar, HeatRow, Series, bar_chart, heat_map, line_chart
from trimtab.report.page import render
from trimtab.units import format_bytes, format_count, format_seconds

_SAMPLED_ROWS = 12
Rows = Sequence[Mapping[str, object]]


def report_page(outcome: Outcome, settings: Settings) -> str:
    """The page as HTML text."""
    words, pictures = _answers(outcome)
    context = {
        "outcome": outcome,
        "settings": settings,
        "promises": [(promise, _chart(promise, settings)) for promise in outcome.promises],
        "tiles": _tiles(outcome),
        "curves": _curves(outcome.metrics),
        "router_chart": _router_chart(outcome.metrics),
        "sampled": _sampled(outcome.metrics),
        "words": words,
        "pictures": pictures,
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


def _chart(promise: Promise, settings: Settings) -> Markup:
    """Base and adapter as bars, with what is promised of them."""
    exact = promise.metric == "exact_match"
    shown = "{:.3f}" if exact else "{:.4f}"
    old, new = shown.format(promise.before), shown.format(promise.after)
    label = f"{promise.title}: {old} with the base, {new} with the adapter"
    if promise.role == "domain":
        least = promise.verdicts[-1].limit
        base = Bar("base", promise.before, old, settings.max_before,
                   f"at most {settings.max_before:.2f}", "muted")
        return bar_chart(label, [base, Bar("adapter", promise.after, new, least,
                                           f"at least {least:.2f}")], top=1.0)
    base = Bar("base", promise.before, old, style="muted")
    if exact:
        least = max(0.0, promise.before - settings.max_read_loss)
        adapter = Bar("adapter", promise.after, new, least, f"at least {shown.format(least)}")
        return bar_chart(label, [base, adapter], top=1.0)
    most = promise.before + settings.max_general_rise
    adapter = Bar("adapter", promise.after, new, most, f"at most {shown.format(most)}")
    return bar_chart(label, [base, adapter], top=1.15 * max(promise.before, promise.after))


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
        ("Mixture", "share of the tokens that teach the new skills, the rest keeps the old ones",
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


def _answers(outcome: Outcome) -> tuple[list[Answers], list[list[Answers]]]:
    """Held-out questions with both answers: those in words alone, and the others by picture."""
    evaluated = [
        Answers(e.prompt.removeprefix("[image] "), e.expected, e.before, e.after or "", e.images)
        for promise in outcome.promises for e in promise.examples
    ]
    words: list[Answers] = []
    pictures: dict[tuple[str, ...], list[Answers]] = {}
    for answer in (*evaluated, *outcome.answers):
        (pictures.setdefault(answer.images, []) if answer.images else words).append(answer)
    return words, list(pictures.values())


def _column(metrics: Rows, name: str) -> list[float]:
    return [_number(row, name) for row in metrics]


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row[name]))
