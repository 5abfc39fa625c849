from __future__ import annotations

from xml.etree import ElementTree as ET

from trimtab.report.stacks import Span, Stack, stack_chart, timeline

NASTY = "a < b & </svg><script>"


def _rects(chart: str, style: str) -> list[dict[str, float]]:
    tree = ET.fromstring(chart)
    found = tree.iter("{http://www.w3.org/2000/svg}rect")
    keys = ("x", "y", "width", "height")
    return [{k: float(r.get(k, "")) for k in keys} for r in found if r.get("class") == style]


def test_parts_lie_end_to_end_in_proportion_and_the_limit_in_scale() -> None:
    stacks = [Stack("a", [("one", 1.0), ("two", 3.0)], "4"), Stack(NASTY, [("two", 2.0)], NASTY)]
    chart = stack_chart(NASTY, stacks, ["one", "two"], limit=5.0, limit_text=NASTY)
    (one,), (two, other) = _rects(chart, "part0"), _rects(chart, "part1")
    assert abs(two["width"] / one["width"] - 3) < 0.01 and abs(other["width"] / one["width"] - 2) < 0.01
    assert abs(two["x"] - one["x"] - one["width"]) < 0.02
    line = next(ET.fromstring(chart).iter("{http://www.w3.org/2000/svg}line"))
    assert abs((float(line.get("x1", "")) - one["x"]) / one["width"] - 5) < 0.05
    assert "<script" not in chart


def test_spans_stand_in_their_row_at_their_time() -> None:
    spans = [Span(0, 0.0, 1.0, "part0", "first"), Span(1, 1.0, 3.0, "part1", NASTY)]
    chart = timeline("t", ["s0", "s1"], spans, x_name="seconds")
    (first,), (second,) = _rects(chart, "part0"), _rects(chart, "part1")
    assert abs(second["x"] - first["x"] - first["width"]) < 1
    assert abs(second["width"] / first["width"] - 2) < 0.01 and second["y"] > first["y"]
    assert "<script" not in chart


def test_an_empty_timeline_is_still_a_drawing() -> None:
    assert ET.fromstring(timeline("t", ["s"], [], x_name="seconds")).get("role") == "img"
