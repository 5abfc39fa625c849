"""Files of training and evaluation records, and what a record is.

Knows: Trimtab's own record forms and where each line of a file starts. Does not know: tokens,
pixels, the forms of other tools (`forms`).

A record is one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      one user and one assistant message
    {"text": "..."}                             plain text, all of it trained on
and may carry `tools`, `images` and any other keys, which are ignored. `content` and `prompt` may
be lists of parts, {"type": "text", "text": "..."} and images as `image_source` describes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab.config.data import Form
from trimtab.data.forms import canonical, detect_form, only
from trimtab.data.image_source import SOURCE, ImageSource, image_source
from trimtab.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = ("messages", "prompt", "text")
_IMAGE_TYPES = ("image", "image_url")


@dataclass(frozen=True, slots=True)
class Record:
    """One record; either `text` or `messages` is set.

    Args:
        text: plain text.
        messages: a conversation with at least one assistant message; image parts hold their
            `ImageSource` under `source`.
        tools: tool descriptions for the template.
        where: `file:line`.
        last_only: of the answers only the last is trained on.
    """

    text: str | None
    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...] | None
    where: str
    last_only: bool = False

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


class RecordFile(Protocol):
    """Random access to the records of a file."""

    path: str
    num_bytes: int
    form: Form

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Record `index`, counted from 0."""

    def where(self, index: int) -> str:
        """`file:line` of record `index`."""


def open_records(
    path: str | Path, form: Form | None = None, *, last_only: bool = False
) -> RecordFile:
    """Open a JSONL file, a Parquet file where the name says so, or a saved data set's directory.

    Args:
        path: file or directory.
        form: of its records; None to find out from the first one.
        last_only: only the last answer of a record is trained on.

    Raises:
        DataError: TT107 where there is no file, TT402 where it has no record, TT604 where Parquet
            needs a package that is not installed.
    """
    if Path(path).suffix in (".parquet", ".pq"):
        from trimtab.data.parquet import ParquetFile

        return ParquetFile(path, form, last_only=last_only)
    if Path(path).is_dir():
        from trimtab.data.arrow import ArrowDirectory

        return ArrowDirectory(path, form, last_only=last_only)
    return JsonlFile(path, form, last_only=last_only)


class JsonlFile:
    """Random access to the records of a file; only line offsets are kept in memory.

    Args:
        path: JSONL file; empty lines are allowed.
        form: of its records; None to find out from the first one.
        last_only: only the last answer of a record is trained on.

    Raises:
        DataError: TT402 where there is no line with content, TT107 where there is no file.
    """

    def __init__(self, path: str | Path, form: Form | None = None, *, last_only: bool = False) -> None:
        self.path, self._last_only = str(path), last_only
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
        self._forced = form
        self.form: Form = form or self._first_form()

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
        value = json_object(self._line(index), self.where(index))
        return record_of(value, self.where(index), str(Path(self.path).parent), self.form,
                         forced=self._forced is not None, last_only=self._last_only)

    def _line(self, index: int) -> bytes:
        begin, end = self._bounds[index]
        return self._bytes[begin:end].tobytes()

    def _first_form(self) -> Form:
        try:
            return detect_form(json_object(self._line(0), self.where(0)))
        except DataError:
            return "messages"  # the line is named when its record is asked for


def read_records(path: str | Path, form: Form | None = None) -> Iterator[Record]:
    """Yield the records of a file in order.

    Args:
        path: file or directory.
        form: of its records; None to find out from the first one.

    Raises:
        DataError: as for `open_records` and `JsonlFile.record`.
    """
    file = open_records(path, form)
    for index in range(len(file)):
        yield file.record(index)


def parse_record(line: bytes, where: str, directory: str = ".") -> Record:
    """Read one line.

    Args:
        line: one JSON object.
        where: `file:line`.
        directory: of the file, where paths of images start.

    Raises:
        DataError: TT401 with the reason; TT406 and TT407 for images.
    """
    return record_from(json_object(line, where), where, directory)


def json_object(line: bytes, where: str) -> Mapping[str, object]:
    """The JSON object of a line.

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
    return value


def record_of(
    value: Mapping[str, object], where: str, directory: str, form: Form, *, forced: bool,
    last_only: bool,
) -> Record:
    """A record of a file of some form.

    Args:
        value: its values.
        where: `file:line`.
        directory: where paths of images start.
        form: of the file.
        forced: the recipe says so; else the first record did.
        last_only: see `Record`.

    Raises:
        DataError: as for `parse_record`.
    """
    own = (only if forced else canonical)(value, form, where)
    record = record_from(own, where, directory)
    return replace(record, last_only=last_only)


def record_from(value: Mapping[str, object], where: str, directory: str) -> Record:
    """Check the values of one record; arguments and errors as for `parse_record`."""
    forms = [form for form in _FORMS if form in value]
    if len(forms) != 1:
        found = ", ".join(forms or list(value)[:8])
        raise DataError(
            "TT401", where, "needs exactly one of `messages`, `prompt` with `completion`, or `text`",
            value=found or "no key",
        )  # fmt: skip
    if forms == ["text"]:
        return Record(_text(value["text"], "text", where), (), None, where)
    images = _Images(value.get("images"), where, directory)
    if forms == ["prompt"]:
        prompt, at = value["prompt"], f"{where}: prompt"
        asked = _parts(prompt, at, images) if isinstance(prompt, list) else None
        messages: Sequence[Mapping[str, object]] = (
            {"role": "user", "content": asked or _text(prompt, "prompt", where)},
            {"role": "assistant", "content": _text(value.get("completion"), "completion", where)},
        )
    else:
        messages = _messages(value["messages"], where, images)
    images.check_all_used()
    return Record(None, tuple(messages), _tools(value.get("tools"), where), where)


class _Images:
    """The images of one record: those named in place, and the list that fills bare parts."""

    def __init__(self, listed: object, where: str, directory: str) -> None:
        if listed is not None and not isinstance(listed, list):
            raise DataError("TT401", f"{where}: images", "must be a list")
        self._listed: list[object] = listed or []
        self._where = where
        self._directory = directory
        self._bare = 0  # parts without an image of their own

    def of_part(self, part: Mapping[str, object], where: str) -> ImageSource:
        named = {k: v for k, v in part.items() if k not in ("type", "text") and v is not None}
        if named:
            return image_source(named, where, self._directory)
        self._bare += 1
        if self._bare > len(self._listed):
            raise DataError(
                "TT407", self._where, f"has more image parts than images ({len(self._listed)} in "
                f"`images`); {where} has none",
                hint="name the image in the part itself, or list one in `images` for each part",
            )  # fmt: skip
        at = f"{self._where}: images[{self._bare - 1}]"
        return image_source(self._listed[self._bare - 1], at, self._directory)

    def check_all_used(self) -> None:
        if self._bare < len(self._listed):
            raise DataError(
                "TT407", self._where, f"lists {len(self._listed)} images for {self._bare} image "
                "parts",
                hint='put a part {"type": "image"} where each image belongs; a typed <image> is '
                "ordinary text",
            )  # fmt: skip


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


def _messages(value: object, where: str, images: _Images) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not value:
        raise DataError("TT401", f"{where}: messages", "must be a list that is not empty")
    messages: list[Mapping[str, object]] = []
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
            message = {**message, "content": _parts(content, f"{at}.content", images)}
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError("TT401", f"{at}.content", "must be a text", value=repr(content))
        messages.append(message)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("TT401", f"{where}: messages", "has no assistant message to learn from")
    return messages


def _parts(parts: list[object], where: str, images: _Images) -> list[Mapping[str, object]]:
    """Parts of a content, images replaced by where they lie."""
    found: list[Mapping[str, object]] = []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in _IMAGE_TYPES:
            found.append({"type": "image", SOURCE: images.of_part(part, at)})
        elif isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        else:
            rule = "must be {type: text, text: ...} or {type: image, ...}"
            raise DataError("TT401", at, rule, value=kind)
    if not found:
        raise DataError("TT401", where, "must have at least one part")
    return found


def _tools(value: object, where: str) -> tuple[Mapping[str, object], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("TT401", f"{where}: tools", "must be a list of objects")
    return tuple(value)
