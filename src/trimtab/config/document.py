"""YAML documents whose every key knows the file and line it stands on.

Knows: YAML, `extends`, `--set`. Does not know: which keys a recipe has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from trimtab.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """Merged values and where each came from.

    Args:
        values: plain nested values.
        marks: key path to `file:line`, or to `--set` for an override.
        source: the file that was asked for.
    """

    values: dict[str, object]
    marks: Mapping[KeyPath, str]
    source: str

    def where(self, path: KeyPath) -> str:
        """`file:line: dotted.path`, with the line of the nearest section that exists."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.marks:
                return f"{self.marks[path[:length]]}: {dotted(path)}"
        return f"{self.source}: {dotted(path)}" if path else self.source


def dotted(path: KeyPath) -> str:
    """Text of a key path.

    >>> dotted(("evaluate", "domain", 0, "path"))
    'evaluate.domain[0].path'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a YAML mapping, the one it `extends`, and apply `--set` overrides on top.

    Raises:
        ConfigError: TT107 no such file, TT106 not YAML or a repeated key, TT102 not a mapping or
            a second level of `extends`, TT108 an override that is not `a.b=value`.
    """
    values, marks = _read_file(path)
    base = values.pop("extends", None)
    if base is not None:
        where = f"{marks[('extends',)]}: extends"
        if not isinstance(base, str):
            raise ConfigError("TT102", where, "must be the path of one recipe", value=base)
        base_values, base_marks = _read_file(path.parent / base, where)
        if "extends" in base_values:
            raise ConfigError(
                "TT102", f"{base_marks[('extends',)]}: extends",
                "a recipe that is extended cannot extend another", value=base_values["extends"],
                hint="copy the keys of the third file into the second",
            )  # fmt: skip
        values = _merged(base_values, values)
        marks = {**base_marks, **marks}
    for override in overrides:
        _apply(values, marks, override)
    return Document(values, marks, str(path))


def _read_file(
    path: Path, asked_by: str | None = None
) -> tuple[dict[str, object], dict[KeyPath, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ConfigError(
            "TT107", asked_by or str(path), "no such file", value=str(path) if asked_by else None
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError("TT106", str(path), f"not UTF-8 text (byte {error.start})") from None
    return _parse(text, str(path))


def document_of(text: str, source: str) -> Document:
    """A document from its text.

    Raises:
        ConfigError: TT106 not YAML or a repeated key, TT102 not a mapping.
    """
    values, marks = _parse(text, source)
    return Document(values, marks, source)


def _parse(text: str, source: str) -> tuple[dict[str, object], dict[KeyPath, str]]:
    marks: dict[KeyPath, str] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is not None:
                _mark(root, (), source, marks)
            values = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise ConfigError(
            "TT106", f"{source}{line}", error.problem or "not valid YAML",
            hint="indent with spaces, and put a space after each colon",
        ) from None  # fmt: skip
    except yaml.YAMLError as error:
        raise ConfigError("TT106", source, str(error).splitlines()[0]) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            "TT102", source, "must be a mapping of keys to values", value=type(values).__name__
        )
    return values, marks


def _mark(node: yaml.Node, path: KeyPath, file: str, marks: dict[KeyPath, str]) -> None:
    """Record the line of every key and list item; refuse a key given twice."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            marks[(*path, index)] = f"{file}:{item.start_mark.line + 1}"
            _mark(item, (*path, index), file, marks)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
            raise ConfigError(
                "TT106",
                f"{file}:{line}",
                "a key must be a plain word",
                value=getattr(key_node, "value", None),
            )
        key = key_node.value
        if key in seen:
            raise ConfigError(
                "TT106", f"{file}:{line}: {dotted((*path, key))}",
                f"is given twice, first on line {seen[key]}", hint="remove one of the two",
            )  # fmt: skip
        seen[key] = line
        marks[(*path, key)] = f"{file}:{line}"
        _mark(value_node, (*path, key), file, marks)


def _merged(base: Mapping[str, object], top: Mapping[str, object]) -> dict[str, object]:
    """Merge mappings key by key; lists and plain values of `top` replace those of `base`."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _apply(values: dict[str, object], marks: dict[KeyPath, str], override: str) -> None:
    """Set one `a.b=value` in place; the value is read as YAML."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            "TT108", "--set", "must be key=value with a dotted key", value=override,
            hint="for example --set finetune.optimizer.lr=3e-5",
        )  # fmt: skip
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(
            "TT108", f"--set {name}", "the value is not valid YAML", value=text
        ) from None
    section: dict[str, object] = values
    for depth, key in enumerate(keys[:-1], start=1):
        below = section.get(key)
        if below is None:
            below = section[key] = {}
        if not isinstance(below, dict):
            raise ConfigError(
                "TT108", f"--set {name}", f"{'.'.join(keys[:depth])} is a value, not a section"
            )
        section = below
    section[keys[-1]] = value
    marks[tuple(keys)] = "--set"
