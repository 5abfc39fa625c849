"""The command line changes on purpose only: verbs, arguments and options are a frozen list."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import typer

from trimtab.cli.main import VERBS, available_verbs

FROZEN = Path(__file__).with_name("cli_flags.txt")


def flags() -> Iterator[str]:
    """One line per command: its name, arguments and options."""
    for verb in available_verbs():
        command = typer.main.get_command(importlib.import_module(VERBS[verb][0]).app)
        for name, inner in {"": command, **getattr(command, "commands", {})}.items():
            if inner is command and getattr(command, "commands", None):
                continue
            words = [
                "/".join((*parameter.opts, *parameter.secondary_opts))
                if parameter.param_type_name == "option"
                else str(parameter.name).upper()
                for parameter in inner.params
            ]
            yield " ".join(filter(None, [verb, name, *words]))


def test_verbs_and_flags_are_those_on_the_list() -> None:
    assert "\n".join(flags()) + "\n" == FROZEN.read_text(), (
        "if the change is meant: PYTHONPATH=src:. python -m tests.contracts.test_cli_flags"
    )


if __name__ == "__main__":
    FROZEN.write_text("\n".join(flags()) + "\n")
