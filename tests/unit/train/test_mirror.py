"""Copies of states: committed by their manifest, pruned, and no secret in any URL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.unit.train.tiny_run import recipe_for, write_recipe
from trimtab.checkpoint.manifest import MANIFEST_NAME
from trimtab.config.load import load_recipe
from trimtab.errors import ConfigError, RunError
from trimtab.train.loop import finetune
from trimtab.train.mirror import Mirror
from trimtab.train.reporter import SilentReporter
from trimtab.train.state import TrainState, snapshot, write_state


def state(directory: Path, step: int) -> Path:
    named = {"a.lora.B": Parameter(torch.full((3,), float(step)))}
    optimizer = torch.optim.AdamW(named.values(), foreach=False)
    return write_state(directory, TrainState(step, {}, "id"), *snapshot(named, optimizer), keep=9)


def test_the_newest_copies_stay_and_hold_the_same_bytes(tmp_path: Path) -> None:
    mirror = Mirror((tmp_path / "far").as_uri(), keep=2, say=print)
    for step in (2, 10, 4):
        mirror.copy(state(tmp_path / "near", step))
    assert mirror.states() == ["step-10", "step-4"]
    near, far = tmp_path / "near" / "step-10", tmp_path / "far" / "step-10"
    assert {p.name: p.read_bytes() for p in near.iterdir()} == {
        p.name: p.read_bytes() for p in far.iterdir()
    }
    assert not (tmp_path / "far" / "step-2").exists()


def test_the_manifest_comes_last_and_a_failure_is_told_without_details(tmp_path: Path) -> None:
    said: list[str] = []
    mirror = Mirror((tmp_path / "far").as_uri(), keep=2, say=said.append)
    order: list[str] = []

    class Broken:
        def makedirs(self, path: str, exist_ok: bool) -> None:
            pass

        def put_file(self, lpath: str, rpath: str) -> None:
            order.append(Path(rpath).name)
            if Path(rpath).name == MANIFEST_NAME:
                raise OSError("https://user:secret@store/?signature=abc")

    mirror._files = Broken()  # type: ignore[assignment]
    mirror.copy(state(tmp_path / "near", 1))
    assert order[-1] == MANIFEST_NAME and len(order) == 4
    assert len(said) == 1 and "OSError" in said[0] and "secret" not in said[0]


def test_a_run_copies_its_states(tmp_path: Path, checkpoint: Path) -> None:
    far = tmp_path / "far"
    recipe = recipe_for(tmp_path, checkpoint, "finetune.steps=2", f"checkpoint.mirror={far.as_uri()}")
    finetune(recipe, SilentReporter())
    assert (far / "step-2" / MANIFEST_NAME).is_file()


@pytest.mark.parametrize("url", ["s3://me:hunter2@bucket/x", "s3://bucket/x?key=1", "bucket/x"])
def test_a_url_with_a_secret_is_refused(tmp_path: Path, checkpoint: Path, url: str) -> None:
    path = write_recipe(tmp_path, checkpoint, output=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"TT102.*mirror") as found:
        load_recipe(path, [f"checkpoint.mirror={url}"])
    assert "hunter2" not in found.value.message


def test_a_url_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"TT604.*mirror"):
        Mirror("nosuch://bucket", keep=1, say=print)
