from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.unit.demo.synthetic import NASTY, outcome, reports
from trimtab.demo.outcome import training_speed
from trimtab.demo.page import report_page
from trimtab.demo.promises import promises
from trimtab.demo.settings import DEMO

VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Balance(HTMLParser):
    """Collects tags and insists that each one opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _parsed(page: str) -> _Balance:
    parser = _Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_loads_nothing_from_outside() -> None:
    page = report_page(outcome(), DEMO)
    tags = {tag for tag, _ in _parsed(page).seen}
    assert tags.isdisjoint({"script", "link", "iframe", "object", "form"})
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "the SVG namespace is a name, not a request"
    assert "url(" not in page and "@import" not in page


def test_text_is_escaped() -> None:
    page = report_page(outcome(), DEMO)
    assert NASTY not in page
    assert "&lt;script&gt;" in page


def test_every_chart_has_words_beside_its_colours() -> None:
    charts = [attrs for tag, attrs in _parsed(report_page(outcome(), DEMO)).seen if tag == "svg"]
    assert len(charts) == 10
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)


def test_a_failed_promise_is_said_in_words() -> None:
    good, bad = report_page(outcome(), DEMO), report_page(outcome(words=0.2), DEMO)
    assert "FAIL" not in good and "keeps what it knew" in good
    assert "FAIL" in bad and "keeps what it knew" not in bad


def test_a_page_of_a_run_without_steps_still_renders() -> None:
    _parsed(report_page(outcome(steps=0), DEMO))


@pytest.mark.parametrize(
    ("changed", "broken"),
    [({}, set()), ({"words": 0.39}, {"words"}), ({"named": 0.79}, {"digits named"}),
     ({"general": 2.12}, {"documentation"}), ({"read": 0.82}, {"digits read"}),
     ({"read": 0.95, "general": 2.0}, set())],
)
def test_promises_compare_the_two_evaluations(
    changed: dict[str, float], broken: set[str]
) -> None:
    found = promises(*reports(**changed), DEMO)
    assert {promise.name for promise in found if not promise.passed} == broken


def test_pictures_stand_beside_their_answers() -> None:
    page = report_page(outcome(), DEMO)
    shown = [attrs for tag, attrs in _parsed(page).seen if tag == "img"]
    assert [str(image["src"])[:22] for image in shown] == ["data:image/png;base64,"], "one card"
    assert all(image["alt"] for image in shown)
    card = page[page.index('<div class="gallery">') : page.index("<h2>The model</h2>")]
    assert [f"<code>{word}</code>" in card for word in ("name:", "read:", "one two", "12")] == [True] * 4
    assert "vision tower" in page and "projector" in page


def test_speed_counts_tokens_over_the_time_of_all_steps() -> None:
    rows = [{"tokens": 100, "step_time_s": 1.0}, {"tokens": 100, "step_time_s": 3.0}]
    assert training_speed(rows) == 50.0
    assert training_speed([]) == 0.0
