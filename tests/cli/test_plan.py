"""`trimtab plan` as a user meets it: exit codes, JSON, errors, the written section."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trimtab.cli.main import run

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 32000,
    "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 8192,
}


def config(tmp_path: Path, **values: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | values))
    return str(path)


def test_a_config_and_a_cluster_name_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "parallel.yaml"
    words = ["plan", "--model", config(tmp_path), "--cluster", "h100", "--devices", "8"]
    assert run([*words, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"] and found["placement"] == "8 ranks = 1 host, 79.2 GiB each"
    assert found["trained_by_trimtab"] is False
    assert yaml.safe_load(out.read_text())["parallel"] == found["parallel"]
    assert run(words) == 0
    page = capsys.readouterr().out
    assert "8 ranks = 1 host" in page and "planned only" in page and "parallel:" in page


def test_nothing_fits_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = config(tmp_path, num_hidden_layers=400, hidden_size=8192, intermediate_size=32768)
    assert run(["plan", "--model", big, "--cluster", "h100", "--hosts", "1"]) == 3
    page = capsys.readouterr().out
    assert "no feasible plan" in page and "base weights" in page and "16 ranks" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--cluster: is required"),
        (["--cluster", "h100"], "--model: is required"),
        (["--cluster", "h100", "--model", "CONFIG"], "needs one of --devices"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "8", "--goal", "best"], "--goal (best)"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "8", "--targets", "qproj"], "TT501"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "8", "--pp", "2", "--stages", "8,9"],
         "add to 16 layers"),
    ],
)
def test_errors_name_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    path = config(tmp_path)
    assert run(["plan", *(path if word == "CONFIG" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_family_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, model_type="llamo")
    assert run(["plan", "--model", path, "--cluster", "h100", "--devices", "8"]) == 2
    assert "TT201" in capsys.readouterr().err


def test_packages_are_ranks_of_two_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", config(tmp_path), "--cluster", "ascend-a3", "--packages", "8", "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 16
