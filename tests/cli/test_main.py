"""The command line answers help, typing errors and failures the same way for every verb."""

from __future__ import annotations

import json

import pytest

from trimtab import __version__
from trimtab.__main__ import main
from trimtab.cli.main import VERBS, available_verbs
from trimtab.errors import ERROR_DOCS


def test_help_lists_the_verbs_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    listed = [verb for verb in VERBS if f"\n  {verb} " in out]
    assert listed == list(available_verbs()) and "inspect" in listed


@pytest.mark.parametrize("verb", available_verbs())
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"trimtab {verb}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trimtab {__version__}\n"


def test_no_verb_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    got = capsys.readouterr()
    assert got.out == "" and "usage: trimtab" in got.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspct", "x"], "did you mean `trimtab inspect`?"),
        (["--verbos"], "no such flag"),
        (["inspect"], "needs a TARGET"),
        (["inspect", "k3-tiny", "--jsn"], "--json"),
        (["inspect", "k3-tiny", "extra"], "extra"),
        (["explain"], "needs an error code"),
        (["explain", "TT999"], "no such error code"),
    ],
)
def test_a_bad_command_line_exits_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    got = capsys.readouterr()
    assert words in got.err and got.out == ""


def test_explain_gives_each_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tt203"]) == 0
    assert ERROR_DOCS["TT203"].action in capsys.readouterr().out
    assert main(["explain", "TT203", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code"] == "TT203"
    assert main(["explain", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ERROR_DOCS)


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.cli.inspect.resolve", interrupt)
    assert main(["inspect", "k3-tiny"]) == 130
