"""`trimtab doctor ops`: what runs here, and why not something faster."""

from __future__ import annotations

import json

import pytest

from trimtab.cli.main import run


def test_doctor_ops_lists_every_operator_with_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "ops", "--device", "cpu", "--json"]) == 0
    operators = {o["operator"]: o for o in json.loads(capsys.readouterr().out)["operators"]}
    assert {"kda", "attention"} <= set(operators)
    for operator in operators.values():
        assert operator["runs"] in [i["name"] for i in operator["implementations"] if i["runs"]]


def test_doctor_ops_follows_a_forced_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "ops", "--device", "cpu", "--force", "kda=reference", "--size", "T=16"]) == 0
    page = capsys.readouterr().out
    assert "T=16" in page
    assert "runs reference" in page


@pytest.mark.parametrize("words", [["--force", "kda"], ["--size", "T=0"], ["--force", "kda=best"]])
def test_doctor_ops_refuses_what_it_cannot_read(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "ops", *words]) == 2
    assert words[1].split("=")[-1] in capsys.readouterr().err
