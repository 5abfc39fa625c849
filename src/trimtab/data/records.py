"""JSONL files of training and evaluation records.

Knows: the record forms and where each line of a file starts. Does not know: tokens.

A record is one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      one user and one assistant message
    {"text": "..."}                             plain text, all of it trained on
and may carry `tools` and any other keys, which are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = ("messages", "prompt", "text")


@dataclass(frozen=True, slots=True)
class Record:
    """One record; either `text` or `messages` is set.

    Args:
        text: plain text.
        messages: a conversation with at least one assistant message.
        tools: tool descriptions for the template.
        where: `file:line`.
    """

    text: str | None
    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...] | None
    where: str

    def prompt_and_answer(self) -> tuple[tuple[Mapping[str, object], ...], str]:
        """Messages before the last assistant message, and the text of that message.

        Raises:
            DataError: TT401 where the record is plain text or its last answer has no text.
        """
        for index in range(len(self.messages) - 1, -1, -1):
            content = self.messages[index].get("content")
            if self.messages[index]["role"] == "assistant" and isinstance(content, str):
                return self.messages[:index], content
        raise DataError("TT401", self.where, "needs messages with an answer to compare with")


class JsonlFile:
    """Random access to the records of a file; only line offsets are kept in memory.

    Args:
        path: JSONL file; empty lines are allowed.

    Raises:
        DataError: TT402 where there is no line with content, TT107 where there is no file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        bounds, lines = [], []
        position = 0
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        bounds.append((position, position + len(line)))
                        lines.append(number)
                    position += len(line)
        except OSError as error:
            raise DataError("TT107", self.path, f"cannot be read: {error.strerror}") from None
        if not bounds:
            raise DataError(
                "TT402", self.path, "has no record", hint="each line is one JSON object"
            )
        self._bounds: NDArray[np.int64] = np.asarray(bounds, np.int64)
        self._lines: NDArray[np.int64] = np.asarray(lines, np.int64)
        # Mapped, not read: records are taken in random order, and the file may be large.
        self._bytes = np.memmap(path, np.uint8, "r")
        self.num_bytes = position

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, index: int) -> str:
        """`file:line` of record `index`."""
        return f"{self.path}:{self._lines[index]}"

    def record(self, index: int) -> Record:
        """Record `index`, counted from 0 without empty lines.

        Raises:
            DataError: TT401 where the line is not a record.
        """
        begin, end = self._bounds[index]
        return parse_record(self._bytes[begin:end].tobytes(), self.where(index))


def read_records(path: str | Path) -> Iterator[Record]:
    """Yield the records of a file in order.

    Raises:
        DataError: as for `JsonlFile` and `JsonlFile.record`.
    """
    file = JsonlFile(path)
    for index in range(len(file)):
        yield file.record(index)


def parse_record(line: bytes, where: str) -> Record:
    """Read one line.

    Raises:
        DataError: TT401 with the reason.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError("TT401", where, f"not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise DataError(
            "TT401", where, f"not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    if not isinstance(value, dict):
        raise DataError("TT401", where, "must be a JSON object", value=type(value).__name__)
    forms = [form for form in _FORMS if form in value]
    if len(forms) != 1:
        found = ", ".join(forms or list(value)[:8])
        raise DataError(
            "TT401", where, "needs exactly one of `messages`, `prompt` with `completion`, or `text`",
            value=found or "no key",
        )  # fmt: skip
    if forms == ["text"]:
        return Record(_text(value["text"], "text", where), (), None, where)
    if forms == ["prompt"]:
        messages: Sequence[Mapping[str, object]] = (
            {"role": "user", "content": _text(value["prompt"], "prompt", where)},
            {"role": "assistant", "content": _text(value.get("completion"), "completion", where)},
        )
    else:
        messages = _messages(value["messages"], where)
    return Record(None, tuple(messages), _tools(value.get("tools"), where), where)


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(
            "TT401", f"{where}: {name}", "must be a text that is not empty", value=repr(value)
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError("TT401", f"{where}: {name}", "has half of a surrogate pair") from None
    return value


def _messages(value: object, where: str) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not value:
        raise DataError("TT401", f"{where}: messages", "must be a list that is not empty")
    for index, message in enumerate(value):
        at = f"{where}: messages[{index}]"
        if not isinstance(message, dict):
            raise DataError("TT401", at, "must be an object with role and content")
        if message.get("role") not in ROLES:
            raise DataError(
                "TT401",
                f"{at}.role",
                f"must be one of {', '.join(ROLES)}",
                value=repr(message.get("role")),
            )
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, f"{at}.content")
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError("TT401", f"{at}.content", "must be a text", value=repr(content))
    if all(message["role"] != "assistant" for message in value):
        raise DataError("TT401", f"{where}: messages", "has no assistant message to learn from")
    return value


def _check_parts(parts: list[object], where: str) -> None:
    for index, part in enumerate(parts):
        if not (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            raise DataError(
                "TT401",
                f"{where}[{index}]",
                "must be {type: text, text: ...}",
                hint="images are not supported yet",
            )


def _tools(value: object, where: str) -> tuple[Mapping[str, object], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("TT401", f"{where}: tools", "must be a list of objects")
    return tuple(value)
