"""Write the pages, or parts of pages, that the code itself describes.

`docs/errors.md` comes from the error codes, the key tables of `docs/recipe.md` from the recipe's
schema: types and ranges from the fields, meanings from the docstrings. The text around the tables
is written by hand. A test holds both pages to what this script would write.
"""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trimtab.cli.explain import errors_page
from trimtab.config.recipe import Recipe

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
_RANGE = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
# A task may leave these out; a validator fills them in before the schema looks.
_FILLED_IN = {"name", "kind", "metric"}
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false",
          "null": "null"}  # fmt: skip


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """The `Attributes:` of a section's docstring, by key."""
    text = textwrap.dedent("    " + (section.__doc__ or ""))
    _, _, attributes = text.partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def summary(section: type[BaseModel]) -> str:
    """The docstring of a section before its attributes, as one paragraph per paragraph."""
    text, _, _ = (section.__doc__ or "").partition("Attributes:")
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def describe_type(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A JSON schema in a few words, such as `integer >= 1`."""
    if "$ref" in schema:
        return describe_type(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    if "anyOf" in schema:
        return " or ".join(describe_type(part, definitions) for part in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return f"list of {describe_type(schema['items'], definitions)}"
    if schema["type"] == "object":
        if "additionalProperties" not in schema or not schema["additionalProperties"]:
            return "section"
        key = "name" if "minLength" in schema.get("propertyNames", {}) else "group word"
        return f"{key} to {describe_type(schema['additionalProperties'], definitions)}"
    return _TYPES[schema["type"]]


def limits(annotation: object) -> Iterator[str]:
    """The ranges of a number, such as `>= 1`; the schema loses those behind a validator."""
    for part in typing.get_args(annotation):
        # A field that stands in a list or mapping has limits of its own, not of this key.
        if typing.get_origin(part) in (tuple, dict) or typing.get_origin(annotation) in (tuple, dict):
            return
        for name, sign in _RANGE.items():
            for holder in (part, *getattr(part, "metadata", ())):
                value = getattr(holder, name, None)
                if isinstance(value, int | float):
                    yield f"{sign} {value}" if abs(value) < 2**32 else f"{sign} 2^{value.bit_length() - 1}"
        yield from limits(part)


def describe_default(field: FieldInfo) -> str:
    """The default as it would stand in a recipe."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None:
        return "`null`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as `tuple[Annotated[TaskSection, ...], ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (section_of(part) for part in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)


def tables(section: type[BaseModel], prefix: str, seen: dict[object, str]) -> Iterator[str]:
    """A heading, the summary and a table for a section, then the same for those below it."""
    seen[section] = prefix
    schema = section.model_json_schema()
    hints = typing.get_type_hints(section, include_extras=True)
    known = meanings(section)
    yield f"### `{prefix}`" if prefix else "### The whole recipe"
    yield summary(section)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    below: dict[str, type[BaseModel]] = {}
    for attribute, field in section.model_fields.items():
        name = field.alias or attribute
        kind = describe_type(schema["properties"][name], schema.get("$defs", {}))
        ranges = ", ".join(dict.fromkeys(limits(hints[attribute])))
        words, null, _ = kind.partition(" or null")
        default = describe_default(field)
        inner = section_of(field.annotation)
        if inner is not None:
            many = "[]" if kind.startswith("list") else ""
            below[f"{prefix}.{name}{many}".lstrip(".")] = inner
            default = "see below" if isinstance(field.default, BaseModel) else default
        if section.__name__ == "TaskSection" and name in _FILLED_IN:
            default = "filled in"
        cells = [f"`{name}`", f"{words} {ranges}".strip() + null, default, known[name]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    yield "\n".join(rows)
    for path, inner in below.items():
        if inner in seen:
            yield f"### `{path}`"
            yield f"As [`{seen[inner]}`](#{re.sub(r'[^a-z_]', '', seen[inner])})."
        else:
            yield from tables(inner, path, seen)


def recipe_page(page: str) -> str:
    """The page with its key tables as the schema has them."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n\n".join(tables(Recipe, "", {})) + "\n\n" + END + after


def main() -> None:
    """Write both pages."""
    page = DOCS / "recipe.md"
    page.write_text(recipe_page(page.read_text()))
    (DOCS / "errors.md").write_text(errors_page())


if __name__ == "__main__":
    main()
