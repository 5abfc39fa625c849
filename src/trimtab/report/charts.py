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
    svg = _svg(_LINE_HEIGHT, label)
    if not xs:
        _text(svg, WIDTH / 2, _LINE_HEIGHT / 2, "no data", "middle")
        return _markup(svg)
    low = min(0.0, *ys) if from_zero else min(ys)
    y_ticks = ticks(low, max(ys), 4)
    x_ticks = [t for t in ticks(min(xs), max(xs), 5) if min(xs) <= t <= max(xs)]
    x_at = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_at = _Scale(y_ticks[0], y_ticks[-1], _LINE_HEIGHT - _BOTTOM, _TOP)
    for tick in y_ticks:
        _rule(svg, _LEFT, y_at(tick), WIDTH - _RIGHT, y_at(tick), "grid")
        _text(svg, _LEFT - 6, y_at(tick) + 4, tick_label(tick), "end")
    for tick in x_ticks:
        _text(svg, x_at(tick), _LINE_HEIGHT - _BOTTOM + 15, tick_label(tick), "middle")
    _text(svg, (_LEFT + WIDTH - _RIGHT) / 2, _LINE_HEIGHT - 4, x_name, "middle", "axis-name")
    for curve in series:
        if curve.points:
            _curve(svg, curve, x_at, y_at)
    return _markup(svg)


def bar_chart(label: str, bars: Sequence[Bar], *, top: float | None = None) -> Markup:
    """Horizontal bars from zero, each with its value written and at most one limit marked.

    Args:
        label: the chart in one sentence, for screen readers.
        bars: from top to bottom.
        top: end of the axis; by default the largest value or limit.
    """
    height = _BAR_ROW * len(bars) + 20
    svg = _svg(height, label)
    left, right = 70, WIDTH - 70
    largest = top or max(max(bar.value, bar.limit or 0.0) for bar in bars) or 1.0
    at = _Scale(0.0, largest, left, right)
    for row, bar in enumerate(bars):
        y = row * _BAR_ROW + 6
        _text(svg, left - 8, y + 16, bar.label, "end", "name")
        _rect(svg, left, y, right - left, 22, "track")
        _rect(svg, left, y, max(at(min(bar.value, largest)) - left, 1.5), 22, bar.style)
        _text(svg, right + 8, y + 16, bar.text, "start", "value")
        if bar.limit is not None:
            x = at(bar.limit)
            _rule(svg, x, y - 4, x, y + 26, "limit")
            last = row == len(bars) - 1
            anchor: _Anchor = "start" if x < (left + right) / 2 else "end"
            shift = 5 if anchor == "start" else -5
            _text(svg, x + shift, y + (38 if last else 16), bar.limit_text, anchor, "limit-text")
    return _markup(svg)


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
    svg = _svg(height, label)
    left, right = 58, WIDTH - 50
    for index, row in enumerate(rows):
        y = index * _HEAT_ROW + 2
        values = _shorten(row.values, _HEAT_COLUMNS)
        width = (right - left) / max(1, len(values))
        _text(svg, left - 8, y + 14, row.label, "end", "name")
        for column, value in enumerate(values):
            share = min(1.0, max(0.0, (value - low) / (high - low or 1.0)))
            cell = _rect(svg, left + column * width, y, width, _HEAT_ROW - 3, "cell")
            cell.set("fill-opacity", f"{0.06 + 0.94 * share:.3f}")
            ET.SubElement(cell, "title").text = f"{row.label}: {value:.3g}"
        if row.values and shows_last:
            _text(svg, right + 7, y + 14, f"{row.values[-1]:.2f}", "start", "value")
    _text(svg, (left + right) / 2, height - 4, x_name, "middle", "axis-name")
    return _markup(svg)


_Anchor = Literal["start", "middle", "end"]


class _Scale:
    """Linear map of values to coordinates."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = low, (high - low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / self._span * self._length


def _curve(svg: ET.Element, curve: Series, x_at: _Scale, y_at: _Scale) -> None:
    steps = [f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in curve.points]
    ET.SubElement(svg, "path", {"class": curve.style, "d": "M" + " L".join(steps)})
    if curve.style != "line" or not curve.shows_last:
        return
    x, y = curve.points[-1]
    ET.SubElement(svg, "circle", {"class": "dot", "r": "3.5",
                                  "cx": f"{x_at(x):.1f}", "cy": f"{y_at(y):.1f}"})
    # Below the dot where the curve ends near the top edge, above it elsewhere.
    shift = 18 if y_at(y) < _TOP + 16 else -9
    _text(svg, x_at(x), y_at(y) + shift, _value(y), "end", "value")


def _value(value: float) -> str:
    """Three digits, thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shorten(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means of equal stretches."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _svg(height: float, label: str) -> ET.Element:
    return ET.Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height:g}",
        "role": "img", "aria-label": label,
    })


def _text(
    parent: ET.Element, x: float, y: float, text: str, anchor: _Anchor, style: str = "tick"
) -> None:
    element = ET.SubElement(parent, "text", {
        "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": style,
    })
    element.text = text


def _rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, style: str
) -> ET.Element:
    return ET.SubElement(parent, "rect", {
        "x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}",
        "class": style,
    })


def _rule(parent: ET.Element, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
    ET.SubElement(parent, "line", {
        "x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}", "class": style,
    })


def _markup(svg: ET.Element) -> Markup:
    # ElementTree has escaped every text and attribute.
    return Markup(ET.tostring(svg, encoding="unicode"))
