"""Reading and writing recipes, with all faults reported at once.

Knows: how a pydantic fault becomes a Trimtab error, and which key a wrong one may have meant.
Does not know: torch, models, what the values do.
"""

from __future__ import annotations

import difflib
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trimtab.config.aliases import ALIASES, NOTES
from trimtab.config.document import Document, KeyPath, dotted, read_document
from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError, ErrorList, TrimtabError

_REQUIRED = "a recipe needs model.path, finetune.data.domain.path (and general) and output"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, check_paths: bool = True
) -> Recipe:
    """Read a recipe file, apply `--set` overrides and check everything.

    Args:
        path: YAML file.
        overrides: texts `a.b=value`, applied in order through the same checks.
        check_paths: also require that local paths named in the recipe exist.

    Raises:
        ConfigError: one fault; `ErrorList` when there are several, in the order of the file.
    """
    document = read_document(Path(path), overrides)
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        raise validation_error(error, document, Recipe, _REQUIRED) from None
    if check_paths:
        missing = list(_missing_paths(recipe, document))
        if missing:
            raise _one_or_list(missing)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Return the YAML of a recipe with every default filled in; it loads to an equal recipe."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def validation_error(
    error: ValidationError, document: Document, root: type[BaseModel], required: str
) -> TrimtabError:
    """All faults that pydantic found in a document, as one error, in the order of the file.

    Args:
        error: of the validation.
        document: what was validated.
        root: the section that the whole document is.
        required: which keys have no default, for the hint.
    """
    details = error.errors(include_url=False)
    return _one_or_list(sorted((_fault(d, document, root, required) for d in details), key=_line))


def _one_or_list(faults: Sequence[TrimtabError]) -> TrimtabError:
    return faults[0] if len(faults) == 1 else ErrorList(list(faults))


def _line(fault: TrimtabError) -> int:
    """Line of a fault; those without one, such as a missing section, come last."""
    found = re.match(r".*?:(\d+): ", fault.where)
    return int(found.group(1)) if found else sys.maxsize


def _fault(
    details: ErrorDetails, document: Document, root: type[BaseModel], required: str
) -> TrimtabError:
    """Turn one pydantic fault into a Trimtab error."""
    path: KeyPath = details["loc"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(path, document, root)
    if details["type"] == "missing":
        return ConfigError("TT103", document.where(path), "is required", hint=required)
    context = details.get("ctx", {})
    value = details["input"]
    if details["type"] == "trimtab":
        path = (*path, *(part for part in str(context["key"]).split(".") if part))
        value = _value_at(document.values, path)
        code, rule, hint = str(context["code"]), str(context["rule"]), str(context["hint"]) or None
    else:
        code, rule = "TT102", _rule(details["msg"])
        near = difflib.get_close_matches(str(value), re.findall(r"'(\w+)'", details["msg"]), n=1)
        hint = f"did you mean {near[0]}?" if near else None
    hidden = isinstance(value, dict | list) or context.get("secret", False)
    shown = None if hidden else repr(value)
    return ConfigError(code, document.where(path), rule, value=shown, hint=hint)


def _rule(message: str) -> str:
    """Say what must hold in the words of our own errors.

    >>> _rule("Input should be greater than or equal to 1")
    'must be at least 1'
    """
    rule = re.sub(r"^(Input|Value|String|Tuple|List) should", "must", message)
    rule = rule.replace("must be a valid ", "must be a ").replace(
        "greater than or equal to", "at least"
    )
    rule = rule.replace("less than or equal to", "at most").replace("dictionary", "section")
    rule = rule.replace("a integer", "an integer").replace("tuple", "list")
    return rule.split(" or instance of")[0]


def _value_at(values: object, path: KeyPath) -> object:
    for part in path:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def _unknown_key(path: KeyPath, document: Document, root: type[BaseModel]) -> ConfigError:
    """Name the key that was probably meant: ours here, ours elsewhere, or another tool's."""
    key = str(path[-1])
    where = document.where(path)
    if key in ALIASES:
        ours = ALIASES[key]
        hint = NOTES.get(key, f"write `{ours}`")
        return ConfigError(
            "TT104", where, f"is another tool's name; Trimtab's is {ours}", hint=hint
        )
    known = dict(_known_paths(root, ()))
    siblings = known.get(_without_items(path[:-1]), ())
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return ConfigError("TT101", where, f"unknown key; did you mean '{near[0]}'?")
    elsewhere = [
        dotted((*section, key)) for section, keys in known.items() if key in keys
    ]  # fmt: skip
    if elsewhere:
        return ConfigError("TT101", where, f"unknown key here; did you mean {elsewhere[0]}?")
    foreign = difflib.get_close_matches(key, ALIASES, n=1, cutoff=0.85)
    hint = (
        f"did you mean {ALIASES[foreign[0]]}?" if foreign else f"known here: {', '.join(siblings)}"
    )
    return ConfigError("TT101", where, "unknown key", hint=hint)


def _without_items(path: KeyPath) -> KeyPath:
    return tuple(part for part in path if isinstance(part, str))


def _known_paths(
    section: type[BaseModel], prefix: KeyPath
) -> Iterator[tuple[KeyPath, tuple[str, ...]]]:
    """Yield (section path, its keys) for a section and all below it."""
    keys = {field.alias or name: field for name, field in section.model_fields.items()}
    yield prefix, tuple(keys)
    for name, field in keys.items():
        for below in _sections_in(field.annotation):
            yield from _known_paths(below, (*prefix, name))


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)


def _missing_paths(recipe: Recipe, document: Document) -> Iterator[ConfigError]:
    """Yield an error for each local path that the recipe names and that does not exist."""
    data = recipe.finetune.data
    named: list[tuple[KeyPath, str]] = [
        (("model", "path"), recipe.model.path),
    ]
    if recipe.finetune.lora.init_from is not None:
        named.append((("finetune", "lora", "init_from"), recipe.finetune.lora.init_from))
    for name, source in (("domain", data.domain), ("general", data.general)):
        paths = () if source is None else source.path
        key: KeyPath = ("finetune", "data", name, "path")
        named += [((*key, i) if len(paths) > 1 else key, path) for i, path in enumerate(paths)]
    for group, tasks in (("domain", recipe.evaluate.domain), ("general", recipe.evaluate.general)):
        named += [(("evaluate", group, i, "path"), task.path) for i, task in enumerate(tasks)]
    for key_path, text in named:
        # `checkpoints/base` is a hub id only where there is no directory `checkpoints`.
        hub_id = key_path == ("model", "path") and _HUB_ID.fullmatch(text) is not None
        hub_id = hub_id and not Path(text).parent.is_dir()
        if "://" not in text and not Path(text).exists() and not hub_id:
            yield ConfigError(
                "TT107", document.where(key_path), "no such file or directory", value=text,
                hint=_nearby(Path(text)),
            )  # fmt: skip


def _nearby(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"there is no directory {parent}; relative paths start at the current directory"
    near = difflib.get_close_matches(path.name, [p.name for p in parent.iterdir()], n=1)
    if near:
        return f"did you mean {parent / near[0]}?"
    return "relative paths start at the current directory"
