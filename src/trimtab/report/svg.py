"""Elements of an SVG drawing.

Knows: attributes. Does not know: charts, colours, which a style sheet gives to the classes.

Drawings are XML trees, so that text is escaped by construction.
"""

from __future__ import annotations

from typing import Literal
from xml.etree import ElementTree as ET

from markupsafe import Markup

Anchor = Literal["start", "middle", "end"]


def svg(width: float, height: float, label: str) -> ET.Element:
    """An empty drawing; `label` says in one sentence what it shows."""
    return ET.Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}",
        "role": "img", "aria-label": label,
    })


def text(
    parent: ET.Element, x: float, y: float, words: str, anchor: Anchor, style: str = "tick"
) -> None:
    """Words at a point."""
    element = ET.SubElement(parent, "text", {
        "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": style,
    })
    element.text = words


def rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, style: str, title: str = ""
) -> ET.Element:
    """A rectangle; its title shows on hovering."""
    element = ET.SubElement(parent, "rect", {
        "x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}",
        "class": style,
    })
    if title:
        ET.SubElement(element, "title").text = title
    return element


def rule(parent: ET.Element, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
    """A straight line."""
    ET.SubElement(parent, "line", {
        "x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}", "class": style,
    })


def markup(root: ET.Element) -> Markup:
    """The drawing as text that goes into a page as it is: ElementTree has escaped it."""
    return Markup(ET.tostring(root, encoding="unicode"))
