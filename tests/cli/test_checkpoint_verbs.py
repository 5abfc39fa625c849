"""init, verify, merge and export: what they write, their exit codes, and nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.tiny import make
from trimtab.checkpoint.adapter import AdapterMeta, save_adapter
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.cli.main import run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    from trimtab.arch.load import read_arch

    arch = read_arch(model)
    targets = targets_of(arch)
    save_adapter(tmp_path / "a", arch, targets, random_tensors(targets), AdapterMeta(str(model)))
    return tmp_path / "a"


def _run(*argv: object) -> int:
    return run([str(arg) for arg in argv])


def test_init_then_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    assert _run("init", "--preset", "k3-tiny", "--out", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["files"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert _run("verify", "structure", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["differences"] == []
    assert _run("verify", "files", out) == 0
    assert _run("init", "--preset", "k3-tiny", "--out", out) == 2
    assert "TT309" in capsys.readouterr().err


def test_init_names_the_nearest_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("init", "--preset", "k3-tinny", "--out", tmp_path / "x") == 2
    assert "did you mean" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_init_refuses_what_the_disk_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20})())
    assert _run("init", "--preset", "k3-tiny", "--out", tmp_path / "x") == 2
    assert "TT311" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_structure_reports_and_exits_with_1(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["stranger"] = torch.zeros(1)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    assert _run("verify", "structure", model) == 1
    out = capsys.readouterr().out
    assert "stranger: left over" in out
    assert "model.norm.weight: missing" in out
    assert _run("verify", "files", model) == 1
    assert "model.safetensors" in capsys.readouterr().out


def test_dump_and_compare(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text('{"sequences": [[1, 2, 3], [4, 5]]}')
    for dtype in ("float64", "float32"):
        assert _run("verify", "dump", model, "--input-ids", ids, "--dtype", dtype, "--out", tmp_path / dtype) == 0
    compare = ("verify", "compare", tmp_path / "float32", tmp_path / "float64")
    assert _run(*compare, "--json") == 0
    capsys.readouterr()
    assert _run(*compare, "--limit", "1e-13", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False


def test_merge_and_export(
    tmp_path: Path, model: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("merge", model, adapter, "--out", tmp_path / "merged", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert len(report["verdicts"]) == 2
    assert _run("verify", "structure", tmp_path / "merged") == 0
    assert _run("export", tmp_path / "merged", "--to", "hf", "--out", tmp_path / "hf") == 0
    assert _run("export", adapter, "--to", "peft", "--out", tmp_path / "peft") == 0
    one, two = (tmp_path / n / "adapter_model.safetensors" for n in ("a", "peft"))
    assert one.read_bytes() == two.read_bytes()


def test_an_export_names_what_the_engine_ignores(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trimtab.arch.load import read_arch

    arch = read_arch(model)
    targets = targets_of(arch, ("kv_b_proj", "o_proj"))
    save_adapter(tmp_path / "a", arch, targets, random_tensors(targets), AdapterMeta(str(model)))
    assert _run("export", tmp_path / "a", "--to", "vllm", "--out", tmp_path / "v") == 0
    assert "warning: vllm ignores the adapter on kv_b_proj: " in capsys.readouterr().err
    assert _run("export", tmp_path / "a", "--to", "peft", "--out", tmp_path / "p", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ignored"] == []


def test_failed_merge_check_leaves_an_unreadable_directory(
    tmp_path: Path, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from trimtab.verify import merged

    plain = merged.copy_checkpoint
    monkeypatch.setattr(
        merged, "copy_checkpoint", lambda *args, adapter, **kwargs: plain(*args, **kwargs)
    )
    assert _run("merge", model, adapter, "--out", tmp_path / "merged") == 1
    assert "FAIL" in capsys.readouterr().out
    assert (tmp_path / "merged" / MARKER_NAME).exists()
    assert _run("verify", "structure", tmp_path / "merged") == 2
    monkeypatch.undo()
    assert _run("merge", model, adapter, "--out", tmp_path / "merged") == 0


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _wrong_type(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["num_experts"] = "many"
    (model / "config.json").write_text(json.dumps(config))


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _nan(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["language_model.model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_no_config, "TT307"), (_truncated, "TT301"), (_wrong_type, "TT202"),
        (_no_weights, "TT307"), (_nan, "TT310"),
    ],
)
def test_bad_checkpoint_ends_with_2_and_writes_nothing(
    tmp_path: Path, model: Path, adapter: Path, spoil: Callable[[Path], None], code: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(model)
    before = sorted(p.name for p in tmp_path.iterdir())
    ids = tmp_path / "m" / "ids.json"
    ids.write_text('{"sequences": [[1, 2, 3]]}')
    commands = (
        ("verify", "dump", model, "--input-ids", ids, "--out", tmp_path / "o"),
        ("merge", model, adapter, "--out", tmp_path / "o"),
        ("export", model, "--to", "hf", "--out", tmp_path / "o"),
    )
    for command in commands:
        assert _run(*command) == 2
        assert code in capsys.readouterr().err
        assert sorted(p.name for p in tmp_path.iterdir()) == before
