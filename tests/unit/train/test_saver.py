"""States written in the background; full disks, locks and requests to stop."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Parameter

from tests.unit.train.tiny_run import recipe_for
from trimtab.checkpoint import manifest
from trimtab.errors import RunError
from trimtab.train.lock import locked, stop_on_sigterm
from trimtab.train.loop import finetune
from trimtab.train.metrics import read_metrics
from trimtab.train.reporter import SilentReporter
from trimtab.train.saver import Saver
from trimtab.train.state import TrainState, newest_state, read_state


def trained() -> tuple[dict[str, Parameter], torch.optim.Optimizer]:
    named = {"a.lora.B": Parameter(torch.ones(3))}
    optimizer = torch.optim.AdamW(named.values(), lr=0.1, foreach=False)
    named["a.lora.B"].grad = torch.ones(3)
    optimizer.step()
    return named, optimizer


def test_a_state_is_that_of_the_moment_of_saving(tmp_path: Path) -> None:
    named, optimizer = trained()
    before = named["a.lora.B"].detach().clone()
    with Saver(tmp_path, keep=1) as saver:
        saver.save(TrainState(1, {}, "id"), named, optimizer)
        with torch.no_grad():
            named["a.lora.B"].zero_()
    assert torch.equal(load_file(tmp_path / "step-1" / "adapter.safetensors")["a.lora.B"], before)


def test_a_full_disk_ends_the_run_and_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, optimizer = trained()
    with Saver(tmp_path, keep=1) as saver:
        saver.save(TrainState(1, {}, "id"), named, optimizer)
        saver.wait()

        def full(self: object, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(manifest.HashingFile, "write", full)
        saver.save(TrainState(2, {}, "id"), named, optimizer)
        with pytest.raises(RunError, match=r"TT311.*No space left"):
            saver.wait()
    newest = newest_state(tmp_path)
    assert newest is not None and read_state(newest).step == 1
    assert {p.name for p in tmp_path.iterdir()} == {"step-1"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB, where the machine lets tests mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path, checkpoint: Path, small_disk: Path) -> None:
    """A state does not fit, then not even run.json; with room the run ends as if nothing had been."""
    more = ("finetune.drift.alert=1000", "checkpoint.every_steps=1", "checkpoint.keep=9")
    run = small_disk / "run"
    recipe = recipe_for(tmp_path, checkpoint, *more, f"output={run}")
    with pytest.raises(RunError, match=r"TT311.*No space left"):
        finetune(recipe, SilentReporter())
    newest = newest_state(run / "checkpoints")  # removes what was half written
    assert newest is not None
    kept = read_state(newest).step
    fill = small_disk / "fill"
    with pytest.raises(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    with pytest.raises(RunError, match=r"TT311.*No space left"):
        finetune(recipe, SilentReporter())
    assert (run / "checkpoints" / f"step-{kept}").is_dir()
    fill.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    result = finetune(recipe, SilentReporter())
    assert result.resumed_from == kept and result.passed
    whole = recipe_for(tmp_path, checkpoint, *more, f"output={tmp_path / 'whole'}")
    finetune(whole, SilentReporter())
    losses = [[row["loss"] for row in read_metrics(r / "metrics.jsonl")]
              for r in (run, tmp_path / "whole")]
    assert losses[0] == losses[1]


def test_a_directory_has_one_owner_and_keeps_nothing_of_the_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        with pytest.raises(RunError, match=r"TT601.*in use"), locked(run):
            pass
        assert list(run.iterdir()) == []
    assert not run.exists()
    with locked(run) as alone:
        assert alone


def test_sigterm_saves_the_state_and_the_same_command_continues(
    tmp_path: Path, checkpoint: Path
) -> None:
    off = ("finetune.drift.alert=1000", "checkpoint.every_steps=50", "finetune.steps=4")
    recipe = recipe_for(tmp_path, checkpoint, *off)
    finetune(recipe_for(tmp_path, checkpoint, *off, f"output={tmp_path / 'whole'}"), SilentReporter())
    with stop_on_sigterm() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    script = (
        "import os, signal, sys\n"
        "from trimtab.config.load import load_recipe\n"
        "from trimtab.train import steps\n"
        "from trimtab.train.loop import finetune\n"
        "from trimtab.train.reporter import SilentReporter\n"
        "real = steps.train_step\n"
        "def second(*args, **kwargs):\n"
        "    if kwargs['step'] == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(*args, **kwargs)\n"
        "steps.train_step = second\n"
        "result = finetune(load_recipe(sys.argv[1], sys.argv[2:]), SilentReporter())\n"
        "sys.exit(0 if result.stopped and result.steps == 2 else 1)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "recipe.yaml"), *off]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
    assert not (tmp_path / "run" / "adapter").exists()
    result = finetune(recipe, SilentReporter())
    assert result.resumed_from == 2 and result.passed
    losses = [[row["loss"] for row in read_metrics(tmp_path / d / "metrics.jsonl")]
              for d in ("run", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
