"""Charts as inline SVG: stacked bars and a timeline.

Knows: geometry. Does not know: what is drawn; colours are the classes `part0` to `part11` of the
page's style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trimtab.report.svg import markup, rect, rule, svg, text

COLOURS = 12
_WIDTH = 920
_ROW, _LEFT, _RIGHT = 26, 70, 90


@dataclass(frozen=True, slots=True)
class Stack:
    """One stacked bar: its name, (part, value) from left to right, and the text after it."""

    label: str
    parts: Sequence[tuple[str, float]]
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one row of a timeline.

    Args:
        row: from the top.
        start, end: in the unit of the axis.
        style: class of the colour.
        title: shown on hovering.
    """

    row: int
    start: float
    end: float
    style: str
    title: str


def stack_chart(
    label: str, stacks: Sequence[Stack], order: Sequence[str], *, left: int = _LEFT,
    limit: float | None = None, limit_text: str = "",
) -> Markup:
    """Stacked horizontal bars over a common axis.

    Args:
        label: the chart in one sentence, for screen readers.
        stacks: from top to bottom.
        order: all part names; the place of a name gives its colour.
        left: room for the bars' names.
        limit: where a mark stands, if anywhere.
        limit_text: what it means.
    """
    largest = max([limit or 0.0, *(sum(v for _, v in stack.parts) for stack in stacks)]) or 1.0
    scale = (_WIDTH - left - _RIGHT) / largest
    bottom = _ROW * len(stacks) + 4
    root = svg(_WIDTH, bottom + (18 if limit is not None else 0), label)
    for row, stack in enumerate(stacks):
        y, x = row * _ROW + 4.0, float(left)
        text(root, left - 8, y + 14, stack.label, "end", "name")
        for name, value in stack.parts:
            width = value * scale
            if width > 0.3:
                rect(root, x, y, width, 18, f"part{order.index(name) % COLOURS}", f"{name}: {value:.3g}")
            x += width
        text(root, _WIDTH - _RIGHT + 8, y + 14, stack.text, "start", "value")
    if limit is not None:
        at = left + limit * scale
        rule(root, at, 0, at, bottom, "limit")
        text(root, at, bottom + 14, limit_text, "end", "limit-text")
    return markup(root)


def timeline(label: str, rows: Sequence[str], spans: Sequence[Span], *, x_name: str) -> Markup:
    """Rows of coloured stretches over a common time.

    Args:
        label: the chart in one sentence, for screen readers.
        rows: names from top to bottom.
        spans: what happens.
        x_name: under the axis.
    """
    last = max((span.end for span in spans), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - 10) / last
    height = max(10, min(_ROW, 400 // max(1, len(rows))))
    root = svg(_WIDTH, height * len(rows) + 22, label)
    for index, name in enumerate(rows):
        text(root, _LEFT - 8, index * height + height * 0.7, name, "end", "name")
        rect(root, _LEFT, index * height + 1, _WIDTH - _LEFT - 10, height - 2, "track")
    for span in spans:
        x = _LEFT + span.start * scale
        width = max(0.4, (span.end - span.start) * scale - 0.3)
        rect(root, x, span.row * height + 1, width, height - 2, span.style, span.title)
    text(root, (_WIDTH + _LEFT) / 2, height * len(rows) + 16, x_name, "middle", "axis-name")
    return markup(root)
