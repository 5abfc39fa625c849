from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.config.load import load_recipe
from trimtab.demo.promises import TITLES
from trimtab.demo.settings import DEMO
from trimtab.demo.workspace import Workspace, discard_artefact, prepare, recipe_text
from trimtab.errors import CheckpointError, RunError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Stands for a checkpoint: the workspace reads no weights."""
    path = tmp_path / "base"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_the_recipe_says_what_the_settings_say(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Workspace(Path("runs/demo"))
    prepare(place, replace(DEMO, domain_limit=3), base)
    assert str(tmp_path) not in place.recipe.read_text(), "typed from the current directory"
    recipe = load_recipe(place.recipe)
    lora = recipe.finetune.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (DEMO.rank, DEMO.alpha, DEMO.dropout)
    assert lora.target_modules == DEMO.target_modules
    assert recipe.finetune.optimizer.lr == DEMO.lr
    assert recipe.finetune.data.general_ratio == pytest.approx(1 - DEMO.domain_ratio)
    assert recipe.finetune.steps == DEMO.steps
    assert [s.limit for s in recipe.evaluate.domain] == [3, 3]
    assert recipe.evaluate.general[1].max_loss == DEMO.max_read_bound
    assert recipe.evaluate.general[0].limit is None
    shares = {Path(f.path).stem: f.share for f in recipe.finetune.data.files}
    assert shares["digits_train"] == pytest.approx(DEMO.domain_ratio * DEMO.domain_digits)
    assert shares["digits_rehearsal"] == pytest.approx(
        (1 - DEMO.domain_ratio) * DEMO.general_digits
    )
    assert {s.name for s in (*recipe.evaluate.domain, *recipe.evaluate.general)} == set(TITLES)
    assert recipe.output == "runs/demo/run"


def test_paths_with_spaces_and_quotes_are_read_back(tmp_path: Path, base: Path) -> None:
    place = Workspace(tmp_path / "my runs, 'new': {1}")
    prepare(place, DEMO, base)
    assert load_recipe(place.recipe).model.path == str(place.base)


def test_preparing_twice_changes_nothing(tmp_path: Path, base: Path) -> None:
    place = Workspace(tmp_path / "demo")
    prepare(place, DEMO, base)
    times = {p: p.stat().st_mtime_ns for p in place.root.rglob("*") if p.is_file()}
    prepare(place, DEMO, base)
    assert times == {p: p.stat().st_mtime_ns for p in place.root.rglob("*") if p.is_file()}


def test_a_changed_recipe_is_not_overwritten(tmp_path: Path, base: Path) -> None:
    place = Workspace(tmp_path / "demo")
    prepare(place, DEMO, base)
    mine = recipe_text(place, DEMO).replace("rank: 32", "rank: 8")
    place.recipe.write_text(mine)
    with pytest.raises(RunError, match=r"TT601.*recipe\.yaml"):
        prepare(place, DEMO, base)
    assert place.recipe.read_text() == mine


def test_another_base_is_not_overwritten(tmp_path: Path, base: Path) -> None:
    place = Workspace(tmp_path / "demo")
    place.base.mkdir(parents=True)
    (place.base / "manifest.json").write_text('{"other": 1}')
    with pytest.raises(CheckpointError, match="TT309"):
        prepare(place, DEMO, base)


def test_a_base_without_manifest_is_refused(tmp_path: Path, base: Path) -> None:
    (base / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="TT305"):
        prepare(Workspace(tmp_path / "demo"), DEMO, base)


def test_only_artefacts_are_discarded(tmp_path: Path) -> None:
    ours, foreign = tmp_path / "ours", tmp_path / "foreign"
    for path in (ours, foreign):
        path.mkdir()
        (path / "notes.txt").write_text("kept")
    (ours / "manifest.json").write_text("{}")
    assert discard_artefact(ours) and not ours.exists()
    assert not discard_artefact(foreign) and (foreign / "notes.txt").exists()
    assert not discard_artefact(tmp_path / "absent")
