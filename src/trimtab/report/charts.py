"""Charts as inline SVG: lines, bars, a heat map.

Knows: geometry. Does not know: colours, which the page's style sheet gives to the classes `line`,
`faint`, `bar`, `cell`, `limit`, so that one chart suits a light and a dark page; what is drawn.

Every chart is built as an XML tree, so that text is escaped by construction, and carries a label
for those who cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.etree import ElementTree as ET

from markupsafe import Markup

from trimtab.report.axis import tick_label, ticks
from trimtab.report.svg import Anchor, markup, rect, rule, svg, text

Point = tuple[float, float]

WIDTH = 460
_LINE_HEIGHT = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 34
_BAR_ROW = 34
_HEAT_ROW = 22
_HEAT_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Series:
    """One curve.

    Args:
        points: (x, y) by rising x.
        style: `line` is the curve to read; `faint` stands behind it.
        shows_last: the last value of a `line` is written.
    """

    points: Sequence[Point]
    style: Literal["line", "faint"] = "line"
    shows_last: bool = True


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar.

    Args:
        label: before the bar.
        value: length.
        text: after the bar.
        limit: where a mark stands, if anywhere.
        limit_text: what the mark means, such as `at least 0.40`.
        style: `bar`, or `muted` for what is compared with.
    """

    label: str
    value: float
    text: str
    limit: float | None = None
    limit_text: str = ""
    style: Literal["bar", "muted"] = "bar"


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One row of a heat map."""

    label: str
    values: Sequence[float]


def line_chart(label: str, series: Sequence[Series], *, x_name: str, from_zero: bool = True) -> Markup:
    """Curves over a common x axis.

    Args:
        label: the chart in one sentence, for screen readers.
        series: curves, the first drawn first.
        x_name: under the x axis.
        from_zero: the y axis includes zero.
    """
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    root = svg(WIDTH, _LINE_HEIGHT, label)
    if not xs:
        text(root, WIDTH / 2, _LINE_HEIGHT / 2, "no data", "middle")
        return markup(root)
    low = min(0.0, *ys) if from_zero else min(ys)
    y_ticks = ticks(low, max(ys), 4)
    x_ticks = [t for t in ticks(min(xs), max(xs), 5) if min(xs) <= t <= max(xs)]
    x_at = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_at = _Scale(y_ticks[0], y_ticks[-1], _LINE_HEIGHT - _BOTTOM, _TOP)
    for tick in y_ticks:
        rule(root, _LEFT, y_at(tick), WIDTH - _RIGHT, y_at(tick), "grid")
        text(root, _LEFT - 6, y_at(tick) + 4, tick_label(tick), "end")
    for tick in x_ticks:
        text(root, x_at(tick), _LINE_HEIGHT - _BOTTOM + 15, tick_label(tick), "middle")
    text(root, (_LEFT + WIDTH - _RIGHT) / 2, _LINE_HEIGHT - 4, x_name, "middle", "axis-name")
    for curve in series:
        if curve.points:
            _curve(root, curve, x_at, y_at)
    return markup(root)


def bar_chart(label: str, bars: Sequence[Bar], *, top: float | None = None) -> Markup:
    """Horizontal bars from zero, each with its value written and at most one limit marked.

    Args:
        label: the chart in one sentence, for screen readers.
        bars: from top to bottom.
        top: end of the axis; by default the largest value or limit.
    """
    height = _BAR_ROW * len(bars) + 20
    root = svg(WIDTH, height, label)
    left, right = 70, WIDTH - 70
    largest = top or max(max(bar.value, bar.limit or 0.0) for bar in bars) or 1.0
    at = _Scale(0.0, largest, left, right)
    for row, bar in enumerate(bars):
        y = row * _BAR_ROW + 6
        text(root, left - 8, y + 16, bar.label, "end", "name")
        rect(root, left, y, right - left, 22, "track")
        rect(root, left, y, max(at(min(bar.value, largest)) - left, 1.5), 22, bar.style)
        text(root, right + 8, y + 16, bar.text, "start", "value")
        if bar.limit is not None:
            x = at(bar.limit)
            rule(root, x, y - 4, x, y + 26, "limit")
            last = row == len(bars) - 1
            anchor: Anchor = "start" if x < (left + right) / 2 else "end"
            shift = 5 if anchor == "start" else -5
            text(root, x + shift, y + (38 if last else 16), bar.limit_text, anchor, "limit-text")
    return markup(root)


def heat_map(
    label: str, rows: Sequence[HeatRow], *, low: float, high: float, x_name: str,
    shows_last: bool = True,
) -> Markup:
    """Rows of cells whose strength grows from `low` to `high`; neighbours are averaged to fit.

    Args:
        label: the chart in one sentence, for screen readers.
        rows: of equal length, from top to bottom.
        low: value drawn palest.
        high: value drawn strongest.
        x_name: what runs from left to right.
        shows_last: the last value of a row is written, as suits a course over time.
    """
    height = _HEAT_ROW * len(rows) + 24
    root = svg(WIDTH, height, label)
    left, right = 58, WIDTH - 50
    for index, row in enumerate(rows):
        y = index * _HEAT_ROW + 2
        values = _shorten(row.values, _HEAT_COLUMNS)
        width = (right - left) / max(1, len(values))
        text(root, left - 8, y + 14, row.label, "end", "name")
        for column, value in enumerate(values):
            share = min(1.0, max(0.0, (value - low) / (high - low or 1.0)))
            cell = rect(root, left + column * width, y, width, _HEAT_ROW - 3, "cell")
            cell.set("fill-opacity", f"{0.06 + 0.94 * share:.3f}")
            ET.SubElement(cell, "title").text = f"{row.label}: {value:.3g}"
        if row.values and shows_last:
            text(root, right + 7, y + 14, f"{row.values[-1]:.2f}", "start", "value")
    text(root, (left + right) / 2, height - 4, x_name, "middle", "axis-name")
    return markup(root)


class _Scale:
    """Linear map of values to coordinates."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = low, (high - low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / self._span * self._length


def _curve(root: ET.Element, curve: Series, x_at: _Scale, y_at: _Scale) -> None:
    steps = [f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in curve.points]
    ET.SubElement(root, "path", {"class": curve.style, "d": "M" + " L".join(steps)})
    if curve.style != "line" or not curve.shows_last:
        return
    x, y = curve.points[-1]
    ET.SubElement(root, "circle", {"class": "dot", "r": "3.5",
                                  "cx": f"{x_at(x):.1f}", "cy": f"{y_at(y):.1f}"})
    # Below the dot where the curve ends near the top edge, above it elsewhere.
    shift = 18 if y_at(y) < _TOP + 16 else -9
    text(root, x_at(x), y_at(y) + shift, _value(y), "end", "value")


def _value(value: float) -> str:
    """Three digits, thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shorten(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means of equal stretches."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
