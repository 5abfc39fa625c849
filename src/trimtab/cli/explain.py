"""`trimtab explain`: the error codes, from the same source as the documentation page."""

from __future__ import annotations

import difflib
import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from trimtab.errors import ERROR_DOCS, ConfigError, ErrorDoc

app = typer.Typer(add_completion=False)

_CATEGORIES = {
    "1": "Recipes and command lines", "2": "Architectures", "3": "Checkpoints",
    "4": "Data", "5": "Adapters", "6": "Runs",
}


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="error code, such as TT203")] = None,
    list_codes: Annotated[bool, typer.Option("--list", help="all codes, one line each")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="the documentation page")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Say what an error code means and what to do about it."""
    if markdown:
        sys.stdout.write(errors_page())
    elif code is not None:
        doc = _find(code)
        sys.stdout.write(json.dumps(asdict(doc)) + "\n" if as_json else _text(doc))
    elif as_json:
        sys.stdout.write(json.dumps({key: asdict(doc) for key, doc in ERROR_DOCS.items()}) + "\n")
    elif list_codes:
        sys.stdout.write("".join(f"{doc.code}  {doc.title}\n" for doc in ERROR_DOCS.values()))
    else:
        raise ConfigError("TT108", "trimtab explain", "needs an error code or --list")


def _find(code: str) -> ErrorDoc:
    wanted = code.strip("[]").upper()
    if wanted not in ERROR_DOCS:
        near = difflib.get_close_matches(wanted, ERROR_DOCS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see `trimtab explain --list`"
        raise ConfigError("TT108", "trimtab explain", "no such error code", value=code, hint=hint)
    return ERROR_DOCS[wanted]


def _text(doc: ErrorDoc) -> str:
    return f"{doc.code}: {doc.title}\n\n{doc.cause}\n\nwhat to do: {doc.action}\n"


def errors_page() -> str:
    """The documentation page of all codes, in Markdown."""
    lines = ["# Error codes", "", "`trimtab explain CODE` prints one entry. This page is written by"]
    lines += ["`trimtab explain --markdown > docs/errors.md`.", ""]
    category = ""
    for doc in ERROR_DOCS.values():
        if doc.code[2] != category:
            category = doc.code[2]
            lines += [f"## {_CATEGORIES[category]}", ""]
        lines += [f"### {doc.code}: {doc.title}", "", doc.cause, "", f"What to do: {doc.action}", ""]
    return "\n".join(lines)
