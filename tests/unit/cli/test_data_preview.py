"""`trimtab data preview` shows what enters the loss, and totals that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trimtab
from trimtab.cli.data import app
from trimtab.errors import DataError

BASE = Path(trimtab.__file__).parent / "demo" / "base"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "[red]q", "completion": "a"}\n' * 5)
    (tmp_path / "g.jsonl").write_text('{"text": "some words"}\n' * 4)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {BASE}}}\n"
        "finetune: {data: {domain: {path: d.jsonl}, general: {path: g.jsonl}}}\n"
        "output: runs/x\n"
    )
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["preview", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_page_marks_what_enters_the_loss(recipe: Path) -> None:
    page = run(str(recipe), "--n", "1")
    assert "<|user|>[red]q<|end_of_msg|><|assistant|>\u00aba<|end_of_msg|>\u00bb" in page
    assert "\u00absome words<|eos|>\u00bb" in page
    assert "next: trimtab finetune" in page


def test_json_is_one_object_with_totals(recipe: Path) -> None:
    shown = json.loads(run(str(recipe), "--json", "--n", "2"))
    assert [item["where"] for item in shown["records"]["domain"]] == ["d.jsonl:1", "d.jsonl:2"]
    domain = shown["sources"]["domain"]
    assert (domain["records"], domain["looked_at"], domain["tokens"]) == (5, 5, 5 * 11)
    assert domain["supervised"] == 10
    assert shown["packs"]["filled"] > 0.9


def test_nothing_is_written(recipe: Path) -> None:
    run(str(recipe))
    assert not (recipe.parent / "runs").exists()


def test_broken_line_is_named(recipe: Path) -> None:
    with (recipe.parent / "d.jsonl").open("a") as file:
        file.write('{"prompt": "x"\n')
    with pytest.raises(DataError, match=r"d\.jsonl:6"):
        run(str(recipe))
