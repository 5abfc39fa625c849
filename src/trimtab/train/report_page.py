"""report.html of a run: one file that needs no network, made from the run directory alone.

Knows: which numbers go into which chart. Does not know: geometry and style (`report`), training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from trimtab import __version__
from trimtab.checkpoint.manifest import write_atomic
from trimtab.errors import RunError
from trimtab.report.axis import smooth
from trimtab.report.charts import HeatRow, Series, heat_map, line_chart
from trimtab.report.page import render
from trimtab.train.metrics import read_metrics
from trimtab.train.run_dir import RunDirectory, RunRecord
from trimtab.units import format_seconds

Rows = Sequence[Mapping[str, object]]
Chart = tuple[str, str, Markup]
_MAPS = 4  # expert maps over the run


def write_report(run: RunDirectory) -> Path:
    """Write RUN/report.html from what the run has written so far.

    Raises:
        RunError: TT603, the directory holds no run.
    """
    record = run.read()
    if record is None:
        raise RunError("TT603", str(run.root), "holds no run", hint="name the `output` of a recipe")
    steps = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    experts = list(read_metrics(run.experts)) if run.experts.exists() else []
    page = report_page(run.root.name, record, steps, experts, run.resolved.read_text("utf-8"))
    write_atomic(run.report, page.encode())
    return run.report


def report_page(name: str, record: RunRecord, rows: Rows, experts: Rows, recipe: str) -> str:
    """The page as HTML text.

    Args:
        name: of the run directory.
        record: run.json.
        rows: of metrics.jsonl.
        experts: of experts.jsonl.
        recipe: resolved.yaml.
    """
    trained = [row for row in rows if "loss" in row]
    sections = [
        ("Loss", "Nats per supervised token; training smoothed, single steps behind it.",
         _loss_charts(trained, rows)),
        ("Experts", "Tokens per expert over the mean of its layer; 1 is perfect balance.",
         _expert_charts(trained, experts)),
        ("Router drift", "How far the adapter moves the routing of fixed tokens away from the "
         "base's.", _drift_charts(rows)),
        ("Speed and memory", "Of each step, pads included.", _speed_charts(trained)),
    ]
    return render("trimtab.train", "run.html.j2", {
        "name": name, "version": __version__, "lead": _lead(record, trained),
        "tiles": _tiles(record, trained, rows), "verdicts": record.verdicts,
        "sections": [section for section in sections if section[2]], "recipe": recipe,
    })


def _lead(record: RunRecord, trained: Rows) -> str:
    if not trained:
        return "No step has been done yet."
    state = "is finished" if record.status == "finished" else f"has {record.total_steps} to do"
    starts = "" if record.starts == 1 else f", in {record.starts} starts"
    return (f"{len(trained)} steps done{starts}; the run {state}. Loss "
            f"{_value(trained[0], 'loss'):.4f} in the first step, "
            f"{_value(trained[-1], 'loss'):.4f} in the last.")


def _tiles(record: RunRecord, trained: Rows, rows: Rows) -> list[tuple[str, str]]:
    if not trained:
        return []
    last = trained[-min(20, len(trained)):]
    mean = sum(_value(row, "loss") for row in last) / len(last)
    tokens, seconds = (sum(_value(row, key) for row in trained) for key in ("tokens", "step_time_s"))
    tiles = [(f"{mean:.4f}", f"loss, mean of the last {len(last)} steps")]
    validated = [_value(row, "validation_domain_loss") for row in rows
                 if "validation_domain_loss" in row]
    if validated:
        tiles.append((f"{min(validated):.4f}", "best domain loss on held-out records"))
    tiles.append((f"{tokens / max(seconds, 1e-9):,.0f}", "tokens per second"))
    used = [_value(row, "mfu") for row in trained if "mfu" in row]
    if used:
        tiles.append((f"{sum(used) / len(used):.1%}", "of this machine's matrix speed"))
    tiles.append((f"{max(_value(row, 'peak_memory_gib') for row in trained):.2f} GiB", "peak memory"))
    tiles.append((format_seconds(record.wall_s), "of training"))
    return tiles


def _loss_charts(trained: Rows, rows: Rows) -> list[Chart]:
    charts = []
    for role in ("domain", "general"):
        points = _points(trained, f"{role}_loss")
        if not points:
            continue
        held = _points(rows, f"validation_{role}_loss")
        kept = "; dots joined by a line: held-out records" if held else ""
        front = Series(held) if held else Series(_smoothed(points))
        behind = Series(_smoothed(points) if held else points, "faint")
        words = f"{role} loss from {points[0][1]:.3f} to {points[-1][1]:.3f}"
        chart = line_chart(words, [behind, front], x_name="step", from_zero=False)
        charts.append((f"{role.capitalize()} loss", f"{role} records in training{kept}", chart))
    charts.append(_curve(trained, "lr", "Learning rate", "of targets without one of their own"))
    charts.append(_curve(trained, "grad_norm", "Gradient norm", "over all adapters, before clipping"))
    branches = _by_name(trained, "grad_norm_by_branch")
    if len(branches) > 1:
        high = max(max(values) for values in branches.values())
        heat = heat_map("Gradient norm by branch and step",
                        [HeatRow(name.partition("_")[0], v) for name, v in branches.items()],
                        low=0.0, high=high, x_name="step")
        charts.append(("Gradient norm by branch", "before clipping", heat))
    return charts


def _expert_charts(trained: Rows, experts: Rows) -> list[Chart]:
    loads = _by_name(trained, "router_max_over_mean")
    if not loads:
        return []
    high = max(2.0, max(max(values) for values in loads.values()))
    over_time = heat_map(
        "Load of the busiest expert over the mean, by layer and step",
        [HeatRow(f"layer {layer}", values) for layer, values in loads.items()],
        low=1.0, high=high, x_name="step",
    )
    charts = [("Imbalance over time", "the busiest expert of each layer", over_time)]
    spots = sorted({round(n * (len(experts) - 1) / (_MAPS - 1)) for n in range(_MAPS)})
    for row in [experts[n] for n in spots] if experts else []:
        tokens = row["tokens"]
        assert isinstance(tokens, Mapping), "written by ExpertLog"
        relative = {k: [n * len(v) / max(1, sum(v)) for n in v] for k, v in tokens.items()}
        heat = heat_map(
            f"Tokens per expert over the mean, by layer, steps {row['since']} to {row['step']}",
            [HeatRow(f"layer {layer}", values) for layer, values in relative.items()],
            low=0.0, high=high, x_name="expert", shows_last=False,
        )
        first = int(str(row["since"])) + 1
        steps = f"steps {first} to {row['step']}" if first != row["step"] else f"step {first}"
        charts.append((f"Experts in {steps}",
                       "a column per expert, or the mean of neighbours", heat))
    return charts


def _drift_charts(rows: Rows) -> list[Chart]:
    measured = [row for row in rows if "router_kl" in row]
    if not measured:
        return []
    layers = _by_name(measured, "router_kl")
    worst = [(_value(row, "step"), max(_numbers(row, "router_kl").values())) for row in measured]
    overlap = [(_value(row, "step"), min(_numbers(row, "router_overlap").values()))
               for row in measured]
    high = max(max(values) for values in layers.values())
    heat = heat_map("KL divergence of the routing by layer and measurement",
                    [HeatRow(f"layer {layer}", values) for layer, values in layers.items()],
                    low=0.0, high=high, x_name="measurement")
    return [
        ("Divergence", "nats, of the layer that moved most",
         line_chart("Largest divergence of a layer", [Series(worst)], x_name="step")),
        ("Same experts", "share of the base's choices kept, in the layer that keeps least",
         line_chart("Smallest overlap of chosen experts", [Series(overlap)], x_name="step")),
        ("Divergence by layer", "nats", heat),
    ]


def _speed_charts(trained: Rows) -> list[Chart]:
    charts = [_curve(trained, "tokens_per_second", "Throughput", "tokens per second")]
    if any("mfu" in row for row in trained):
        charts.append(_curve(trained, "mfu", "Share of the matrix speed",
                             "operations counted in one micro-batch, over the fastest matrix "
                             "product of this machine"))
    charts.append(_curve(trained, "peak_memory_gib", "Peak memory", "GiB, resident"))
    return charts if trained else []


def _curve(rows: Rows, key: str, title: str, note: str) -> Chart:
    points = _points(rows, key)
    noisy = key in ("grad_norm", "tokens_per_second", "mfu")
    series = [Series(points, "faint"), Series(_smoothed(points))] if noisy else [
        Series(points, shows_last=key != "lr")
    ]
    return title, note, line_chart(f"{title} by step", series, x_name="step")


def _points(rows: Rows, key: str) -> list[tuple[float, float]]:
    return [(_value(row, "step"), _value(row, key)) for row in rows if key in row]


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return list(zip((x for x, _ in points), smooth([y for _, y in points], 0.8), strict=True))


def _by_name(rows: Rows, key: str) -> dict[str, list[float]]:
    """Columns of a value that is one level deep, those that every row has."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, number in _numbers(row, key).items():
            found.setdefault(name, []).append(number)
    return found


def _numbers(row: Mapping[str, object], key: str) -> dict[str, float]:
    values = row.get(key)
    return {str(k): float(v) for k, v in values.items()} if isinstance(values, Mapping) else {}


def _value(row: Mapping[str, object], key: str) -> float:
    return float(str(row[key]))
