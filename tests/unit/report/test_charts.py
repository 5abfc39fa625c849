from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from markupsafe import Markup

from trimtab.report.charts import (
    WIDTH,
    Bar,
    HeatRow,
    Series,
    bar_chart,
    heat_map,
    line_chart,
)

NASTY = "a < b & \"c\" 'd' </svg><script>alert(1)</script>"


def _tree(markup: Markup) -> ET.Element:
    return ET.fromstring(markup)


def _all(tree: ET.Element, tag: str) -> list[ET.Element]:
    return list(tree.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def _charts() -> list[Markup]:
    points = [(1.0, 3.0), (2.0, 1.5), (3.0, 1.0)]
    return [
        line_chart(NASTY, [Series(points, "faint"), Series(points)], x_name=NASTY),
        bar_chart(NASTY, [Bar(NASTY, 0.5, NASTY, 0.4, NASTY)]),
        heat_map(NASTY, [HeatRow(NASTY, [1.0, 2.0])], low=1.0, high=2.0, x_name=NASTY),
    ]


@pytest.mark.parametrize("chart", _charts(), ids=["line", "bar", "heat"])
def test_charts_are_valid_xml_with_escaped_text(chart: Markup) -> None:
    tree = _tree(chart)
    assert tree.get("aria-label") == NASTY
    assert NASTY in [text.text for text in _all(tree, "text")]
    assert "<script" not in chart


@pytest.mark.parametrize("chart", _charts(), ids=["line", "bar", "heat"])
def test_charts_carry_no_colour_of_their_own(chart: Markup) -> None:
    assert "fill=" not in chart and "style=" not in chart and "stroke=" not in chart


def test_a_curve_stays_inside_and_ends_with_its_value() -> None:
    tree = _tree(line_chart("loss", [Series([(1.0, 3.0), (50.0, 0.25)])], x_name="step"))
    (path,) = _all(tree, "path")
    numbers = [float(n) for n in path.get("d", "").replace("M", " ").replace("L", " ").split()]
    height = float(tree.get("viewBox", "").split()[-1])
    assert all(0 <= x <= WIDTH for x in numbers[::2])
    assert all(0 <= y <= height for y in numbers[1::2])
    assert numbers[3] > numbers[1], "a falling curve goes down the page"
    assert "0.25" in [text.text for text in _all(tree, "text")]


def test_a_chart_without_data_says_so() -> None:
    tree = _tree(line_chart("loss", [Series([])], x_name="step"))
    assert [text.text for text in _all(tree, "text")] == ["no data"]


def test_bars_are_as_long_as_their_values() -> None:
    tree = _tree(bar_chart("b", [Bar("a", 0.25, "0.25"), Bar("b", 0.5, "0.50")], top=1.0))
    found = [float(r.get("width", "0")) for r in _all(tree, "rect") if r.get("class") == "bar"]
    assert found[1] == pytest.approx(2 * found[0])


def test_a_long_heat_row_is_averaged_and_ends_with_its_last_value() -> None:
    values = [1.0] * 500 + [3.0] * 500
    tree = _tree(heat_map("r", [HeatRow("layer 1", values)], low=1.0, high=3.0, x_name="step"))
    strengths = [float(cell.get("fill-opacity", "0")) for cell in _all(tree, "rect")]
    assert len(strengths) == 60
    assert strengths[0] == pytest.approx(0.06) and strengths[-1] == pytest.approx(1.0)
    assert "3.00" in [text.text for text in _all(tree, "text")]
