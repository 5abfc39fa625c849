"""Arguments of a tool call: from an object or its JSON text to typed texts and back.

Knows: the types that K3's format names. Does not know: elements.

Values that are no strings are written as JSON. Where a call came as JSON text each value keeps the
characters that the client sent (`1e2` stays `1e2`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument.

    Args:
        key: its name.
        type: string, number, boolean, null, object or array.
        text: as written in the element's body.
    """

    key: str
    type: str
    text: str


def split_arguments(arguments: object) -> list[Argument] | str | None:
    """Arguments one by one, or the text itself where it is not a JSON object.

    Returns:
        None where `arguments` is neither an object nor a text nor missing.
    """
    if arguments is None or arguments == "":
        return []
    if isinstance(arguments, str):
        try:
            return _split_text(arguments)
        except (ValueError, IndexError, RecursionError):
            return arguments
    if not isinstance(arguments, Mapping):
        return None
    return [
        Argument(
            str(key),
            type_name(value),
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        )
        for key, value in arguments.items()
    ]


def join_value(kind: str, text: str) -> object:
    """Value of an argument; text that is not of its kind stays text."""
    if kind == "string":
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def type_name(value: object) -> str:
    """The format's name for the type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _split_text(text: str) -> list[Argument]:
    """Members of a JSON object.

    Raises:
        ValueError, IndexError: the text is not a JSON object.
    """
    decoder = json.JSONDecoder()
    at = _expect(text, 0, "{")
    found: list[Argument] = []
    if text[at] == "}":
        return _end(text, at, found)
    while True:
        key, end = decoder.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key must be a text")
        at = _expect(text, end, ":")
        value, end = decoder.raw_decode(text, at)
        found.append(
            Argument(key, type_name(value), value if isinstance(value, str) else text[at:end])
        )
        at = _skip(text, end)
        if text[at] == "}":
            return _end(text, at, found)
        at = _expect(text, at, ",")


def _end(text: str, at: int, found: list[Argument]) -> list[Argument]:
    if _skip(text, at + 1) != len(text):
        raise ValueError("text after the object")
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _expect(text: str, at: int, character: str) -> int:
    """Position after a character and the white space around it."""
    at = _skip(text, at)
    if text[at] != character:
        raise ValueError(f"needs {character}")
    return _skip(text, at + 1)
