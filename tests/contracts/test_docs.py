"""The documentation is true: its commands run, its links lead somewhere, its tables are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import write_docs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])
RUN = re.compile(r"<!-- run -->\n```bash\n(.*?)```", re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_key_tables_of_the_recipe_page_are_current() -> None:
    page = ROOT / "docs" / "recipe.md"
    assert page.read_text() == write_docs.recipe_page(page.read_text()), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


@pytest.fixture
def shell_path(tmp_path: Path) -> str:
    """PATH with a `trimtab` that runs this checkout."""
    script = tmp_path / "bin" / "trimtab"
    script.parent.mkdir()
    source = ROOT / "src"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{source}" exec "{sys.executable}" -m trimtab "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}{os.pathsep}{os.environ['PATH']}"


# A page is one story of a dozen commands, each of which imports torch anew.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [p for p in PAGES if RUN.search(p.read_text())], ids=name)
def test_marked_commands_run_in_their_order(page: Path, tmp_path: Path, shell_path: str) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    for block in RUN.findall(page.read_text()):
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=directory, capture_output=True,
            text=True, check=False, timeout=800, stdin=subprocess.DEVNULL,
            env=os.environ | {"PATH": shell_path},
        )
        assert run.returncode == 0, f"{block}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
