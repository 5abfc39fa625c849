"""The page of error codes is the one that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

from trimtab.cli.explain import errors_page
from trimtab.errors import ERROR_DOCS

ROOT = Path(__file__).parents[2]


def test_errors_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    assert page == errors_page(), "run `trimtab explain --markdown > docs/errors.md`"


def test_every_code_raised_is_documented() -> None:
    used: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        used |= set(re.findall(r"\"(TT\d{3})\"", path.read_text()))
    assert used <= set(ERROR_DOCS)
