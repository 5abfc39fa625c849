"""Copies of states: committed by their manifest, pruned, and no secret in any URL."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.support.object_store import s3_server
from tests.unit.train.test_loop import Said
from tests.unit.train.tiny_run import recipe_for, write_recipe
from trimtab.checkpoint.manifest import MANIFEST_NAME
from trimtab.config.load import load_recipe
from trimtab.errors import ConfigError, RunError
from trimtab.train.loop import finetune
from trimtab.train.mirror import Mirror
from trimtab.train.reporter import SilentReporter
from trimtab.train.saver import Saver
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


def test_a_slow_store_delays_no_save_and_gets_the_newest(tmp_path: Path) -> None:
    """While one state is copied others are saved; what waits stays on disk, the newest is copied."""
    near, far = tmp_path / "near", tmp_path / "far"
    mirror = Mirror(far.as_uri(), keep=9, say=pytest.fail)
    real, entered, go_on = mirror._files.put_file, threading.Event(), threading.Event()

    def slow(lpath: str, rpath: str) -> None:
        entered.set()
        assert go_on.wait(60)
        real(lpath, rpath)

    mirror._files.put_file = slow  # type: ignore[method-assign]
    named = {"a.lora.B": Parameter(torch.ones(3))}
    optimizer = torch.optim.AdamW(named.values(), foreach=False)
    with mirror, Saver(near, keep=1, mirror=mirror) as saver:
        saver.save(TrainState(1, {}, "id"), named, optimizer)
        assert entered.wait(60)
        for step in (2, 3, 4):
            saver.save(TrainState(step, {}, "id"), named, optimizer)
            saver.wait()
        # 1 is being copied; 2 gave way to 3, and 3 to 4.
        assert {p.name for p in near.iterdir()} == {"step-1", "step-3", "step-4"}
        assert mirror.in_use() == {near / "step-1", near / "step-4"}
        go_on.set()
    assert mirror.states() == ["step-4", "step-1"] and not mirror.in_use()


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


def test_states_go_to_s3_and_no_credentials_into_files_or_words(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    secret, said = "wJalrXUtnFEMIK7MDENGbPxRfiCY", Said()
    with s3_server() as port:
        for key, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(key, value)
        s3fs.S3FileSystem.clear_instance_cache()
        system = s3fs.S3FileSystem()
        system.mkdir("runs")
        more = ("finetune.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=2")
        finetune(recipe_for(tmp_path, checkpoint, *more, "checkpoint.mirror=s3://runs/one"), said)
        found = system.find("runs/one")
        near = tmp_path / "run/checkpoints/step-4"
        assert {name for name in found if "/step-4/" in name} == {
            f"runs/one/step-4/{path.name}" for path in near.iterdir()
        }
        manifest = system.cat_file(f"runs/one/step-4/{MANIFEST_NAME}")
        assert manifest == (near / MANIFEST_NAME).read_bytes()
    # The store is gone: the run ends well, and says so without a word of the store's.
    more = ("finetune.steps=1", "checkpoint.mirror=s3://runs/two", f"output={tmp_path / 'b'}")
    assert finetune(recipe_for(tmp_path, checkpoint, *more), said).passed
    s3fs.S3FileSystem.clear_instance_cache()
    (failed,) = [line for line in said.lines if line.startswith("warning: step-")]
    assert "step-1 was not copied to s3://runs/two" in failed
    written = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file())
    assert secret not in written and secret not in "".join(said.lines)
