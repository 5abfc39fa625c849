from __future__ import annotations

import io
import json
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from tests.unit.train.tiny_run import write_checkpoint
from trimtab.cli import main
from trimtab.demo.outcome import Outcome
from trimtab.demo.run import run_demo
from trimtab.demo.settings import DEMO, Settings
from trimtab.train.reporter import SilentReporter, Update

SMALL = replace(
    DEMO, steps=4, tokens_per_step=256, micro_batch_tokens=256, max_seq_len=128, rank=4,
    every_steps=1, domain_limit=4, general_limit=2, max_new_tokens=6, num_prompts=1,
)


class _Interrupting(SilentReporter):
    """Raises as Ctrl-C does when training reaches a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @contextmanager
    def progress(self, title: str) -> Iterator[Update]:
        def update(done: int, total: int, words: str = "") -> None:
            if title == "training" and done == self.step:
                raise KeyboardInterrupt

        yield update


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random base of toy size: it learns nothing in four steps, but every verb has work."""
    return write_checkpoint(tmp_path / "random", seed=3)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no process group."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"called with {args} {kwargs}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("torch.distributed.init_process_group", refuse)


def _typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    words = shlex.split(line)
    assert words[0] == "trimtab"
    capsys.readouterr()
    code = main.run(words[1:])
    return code, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_demo_from_interruption_to_report_and_again_by_hand(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("runs/demo")
    with pytest.raises(KeyboardInterrupt):
        _run(out, base, SMALL, _Interrupting(3))
    outcome, text = _run(out, base, SMALL, SilentReporter())
    assert outcome.training.resumed_from in (2, 3)
    assert [row["step"] for row in outcome.metrics] == [1, 2, 3, 4]

    found = json.loads((out / "results.json").read_text())
    assert found == json.loads(json.dumps(outcome.as_dict()))
    assert found["passed"] is False, "a random base learns nothing in four steps"
    for name in ("domain_exact_match", "image_exact_match"):
        assert found[name]["before"] == 0.0
        assert found[name]["records"] == SMALL.domain_limit
    assert found["image_old_skill"]["records"] == SMALL.general_limit
    assert found["general_bits_per_byte"]["before"] > 4.0
    assert 0 < found["trainable_share"] < 1 and found["tokens_per_second"] > 0
    failed = {v["name"] for v in found["verdicts"] if not v["passed"]}
    assert failed and all("exact" in name or "bits" in name for name in failed)
    assert all(Path(path).exists() for path in found["files"])
    assert any("projector" in name for name in _names(out / "run" / "adapter"))
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page and "<dt><code>name:</code></dt>" in page
    commands = [line for step in found["steps"] for line in step["commands"]]
    assert len(commands) == 10
    assert sum("--image" in line for line in commands) == SMALL.num_images
    assert all(f"$ {line}" in text for line in commands)

    scores = json.loads((out / "after.json").read_text())
    for line in commands:
        if line.startswith(("trimtab merge", "trimtab export")):
            code, _ = _typed(f"{line}-by-hand", capsys)
        else:
            code, said = _typed(line, capsys)
        assert code == (1 if line.endswith("after.json") else 0), line
    assert outcome.answers[-1].images and outcome.answers[-1].adapter.strip() in said
    again = json.loads((out / "after.json").read_text())
    assert {**again, "wall_s": 0} == {**scores, "wall_s": 0}
    for made in ("merged", "peft"):
        assert _weights(out / made) == _weights(out / f"{made}-by-hand")
    assert "keeps what it knew" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_finished_demo_runs_again_without_training(base: Path, tmp_path: Path) -> None:
    first, _ = _run(tmp_path / "demo", base, SMALL, SilentReporter())
    second, text = _run(tmp_path / "demo", base, SMALL, SilentReporter())
    assert second.training.was_finished and "finished earlier: 4 steps" in text
    assert second.promises == first.promises
    assert second.tokens_per_second == first.tokens_per_second
    assert text.count("in place of an earlier one") == 2


def test_demo_help_hides_what_is_for_development(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["demo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--out" in shown and "--json" in shown and "--base" not in shown


def test_a_directory_of_something_else_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "recipe.yaml").write_text("mine: true\n")
    assert main.run(["demo", "--out", str(tmp_path / "demo"), "--base", str(base)]) == 2
    assert "TT601" in capsys.readouterr().err
    assert (tmp_path / "demo" / "recipe.yaml").read_text() == "mine: true\n"


def _run(
    out: Path, base: Path, settings: Settings, reporter: SilentReporter
) -> tuple[Outcome, str]:
    stream = io.StringIO()
    console = Console(file=stream, width=200, highlight=False)
    outcome = run_demo(out, console=console, settings=settings, base=base, reporter=reporter)
    return outcome, stream.getvalue()


def _names(directory: Path) -> list[str]:
    with safe_open(directory / "adapter_model.safetensors", "np") as file:
        return list(file.keys())


def _weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}
