"""The shipped recipes are valid, say how to run them, and fit the models they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.config.load import dump_recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the recipes start at the checkout."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_says_how_to_run_it(path: Path) -> None:
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"trimtab finetune recipes/{path.name}" in header


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_values_are_valid_and_its_data_is_there(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [f"model.path={tmp_path}"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_recipe(recipe))
    assert load_recipe(resolved) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_targets_exist_in_the_tiny_model(path: Path, tmp_path: Path) -> None:
    lora = load_recipe(path, [f"model.path={tmp_path}"]).finetune.lora
    arch = load_arch(preset_config("k3.1-tiny"), "k3.1-tiny")
    targets = resolve_targets(
        arch, target_modules=lora.target_modules, rank=lora.rank, alpha=lora.alpha
    )
    assert targets
