"""A drill: a run that is killed again and again must end with the bits of one that is not.

Knows: processes, signals, when a state is being written. Does not know: how a run saves.

The recipe runs twice below one directory: `whole` in one piece, `killed` with kills at random
moments: SIGKILL, SIGTERM, and SIGKILL in the middle of writing a state. Then both adapters, and
the losses of all steps, are compared bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from trimtab.checkpoint.adapter import WEIGHTS_NAME
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.errors import RunError
from trimtab.train.metrics import read_metrics
from trimtab.train.run_dir import RunDirectory
from trimtab.verdict import Verdict

Kill = Literal["SIGKILL", "SIGTERM", "SIGKILL while saving"]
KILLS: tuple[Kill, ...] = ("SIGKILL", "SIGTERM", "SIGKILL while saving")
_POLL_S = 0.001
_SAVE_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class DrillReport:
    """What a drill did and found.

    Args:
        kills: how often each kind hit the run.
        starts: of the killed run, the last one included.
        verdicts: adapters and losses.
    """

    kills: dict[str, int]
    starts: int
    verdicts: tuple[Verdict, ...]


def run_drill(
    recipe: Path, out: Path, *, kills: int, seed: int = 0, overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> DrillReport:
    """Run a recipe whole and killed, and compare.

    Args:
        recipe: recipe file; should save often, and take a second or more per few steps.
        out: new directory for both runs.
        kills: number of kills.
        seed: of kinds and moments.
        overrides: texts `key=value` for both runs.
        say: told of every kill.

    Raises:
        RunError: TT603, a start fails by itself; its last words are in the message.
    """
    draw = random.Random(seed)
    whole, killed = out / "whole", out / "killed"
    begun = time.monotonic()
    _finish(_command(recipe, whole, overrides), say)
    moments = _Moments(draw, time.monotonic() - begun, whole, kills)
    done: Counter[str] = Counter()
    starts = 0
    while sum(done.values()) < kills and not (killed / "adapter").is_dir():
        starts += 1
        kind: Kill = KILLS[draw.randrange(len(KILLS))]
        if _start_and_kill(_command(recipe, killed, overrides), killed, kind, moments):
            done[kind] += 1
            say(f"kill {sum(done.values())} of {kills}: {kind} after step {_last_step(killed)}")
    _finish(_command(recipe, killed, overrides), say)
    return DrillReport(dict(done), starts + 1, compare_runs(killed, whole))


def compare_runs(found: Path, expected: Path) -> tuple[Verdict, ...]:
    """Adapters and losses of two run directories, bit for bit."""
    ours, theirs = (load_file(run / "adapter" / WEIGHTS_NAME) for run in (found, expected))
    wrong = sorted(ours.keys() ^ theirs.keys()) + [
        name for name in sorted(ours.keys() & theirs.keys())
        if not torch.equal(ours[name], theirs[name])
    ]
    rows = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(RunDirectory(run).metrics)
         if "loss" in row]
        for run in (found, expected)
    ]
    steps = sum(a != b for a, b in zip(*rows, strict=False)) + abs(len(rows[0]) - len(rows[1]))
    return (
        Verdict.at_most("adapter tensors that differ", len(wrong), 0, wrong[0] if wrong else "none"),
        Verdict.at_most("steps whose loss or gradient norm differs", steps, 0,
                        f"{len(rows[1])} steps"),
    )


def _command(recipe: Path, output: Path, overrides: Sequence[str]) -> list[str]:
    values = [*overrides, f"output={output}"]
    sets = [word for value in values for word in ("--set", value)]
    return [sys.executable, "-m", "trimtab", "finetune", str(recipe), *sets]


def _finish(command: list[str], say: Callable[[str], None]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError("TT603", " ".join(command), f"exit code {done.returncode}: {done.stderr[-800:]}")
    say(done.stdout.strip().splitlines()[0] if done.stdout.strip() else "finished")


class _Moments:
    """When a start is killed: one in four before its first step, the others a little after it.

    Args:
        draw: of the moments.
        length: seconds of the undisturbed run.
        whole: its directory.
        kills: how many must fit into the run.
    """

    def __init__(self, draw: random.Random, length: float, whole: Path, kills: int) -> None:
        rows = list(read_metrics(RunDirectory(whole).metrics))
        training = sum(float(str(row.get("step_time_s", 0.0))) for row in rows)
        self._draw, self._before = draw, max(0.0, length - training)
        self._after = 1.5 * training / kills

    def wait(self, job: subprocess.Popen[str], run: Path) -> None:
        """Return when a start is to be killed, or has ended."""
        if self._draw.random() < 0.25:
            _sleep(job, self._draw.uniform(0.0, self._before))
            return
        known = _last_step(run)
        while job.poll() is None and _last_step(run) == known:
            time.sleep(_POLL_S)
        _sleep(job, self._draw.uniform(0.0, self._after))


def _sleep(job: subprocess.Popen[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while job.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _start_and_kill(command: list[str], run: Path, kind: Kill, moments: _Moments) -> bool:
    """Start a run and end it; False where it ended by itself before.

    Raises:
        RunError: TT603, it failed by itself.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        moments.wait(job, run)
        if kind == "SIGKILL while saving":
            deadline = time.monotonic() + _SAVE_WAIT_S
            while job.poll() is None and not _is_saving(run) and time.monotonic() < deadline:
                time.sleep(0)  # a small state is written in milliseconds
        alive = job.poll() is None
        if alive:
            os.kill(job.pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
        _, words = job.communicate()
        if job.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):
            raise RunError("TT603", " ".join(command), f"exit code {job.returncode}: {words[-800:]}")
        return alive


def _is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(f"step-*/{MARKER_NAME}"))


def _last_step(run: Path) -> int:
    metrics = RunDirectory(run).metrics
    rows = list(read_metrics(metrics)) if metrics.exists() else []
    return int(str(rows[-1]["step"])) if rows else 0
