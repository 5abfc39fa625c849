"""config.json -> ArchSpec: finds the file and the reader of its family.

Knows: the table of families. Does not know: the fields of any of them (see `readers`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from trimtab.arch.outline import Outline, outline_of
from trimtab.arch.readers import (
    deepseek_v3,
    deepseek_v32,
    glm5_next,
    glm_moe_dsa,
    kimi_k3,
    kimi_k25,
    kimi_linear,
)
from trimtab.arch.readers.planned import NAMES as PLANNED
from trimtab.arch.readers.planned import read_planned
from trimtab.arch.spec import ArchSpec
from trimtab.errors import ArchError, ConfigError

Reader = Callable[[Mapping[str, object], str], ArchSpec]

# model_type -> reader; the weight map of the same family stands in `maps`.
READERS: dict[str, Reader] = {
    "deepseek_v3": deepseek_v3.read,
    "deepseek_v32": deepseek_v32.read,
    "glm5_next": glm5_next.read,
    "glm5_next_text": glm5_next.read,
    "glm_moe_dsa": glm_moe_dsa.read,
    "kimi_k2": deepseek_v3.read,
    "kimi_k25": kimi_k25.read,
    "kimi_k3": kimi_k3.read,
    "kimi_linear": kimi_linear.read,
}


def load_arch(config: Mapping[str, object], source: str = "config.json") -> ArchSpec:
    """Turn a parsed config.json into an architecture.

    Args:
        config: the parsed file.
        source: where it came from, for messages.

    Raises:
        ArchError: unknown model_type (TT201), a bad field (TT202) or an unknown one (TT203).
    """
    if not isinstance(config, Mapping):
        raise ArchError("TT202", source, "must be a JSON object", value=type(config).__name__)
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ArchError(
            "TT202", f"{source}: model_type", "must be a string", value=json.dumps(family),
            hint=f"supported families: {', '.join(READERS)}",
        )
    if family in READERS:
        return READERS[family](config, source)
    if family in PLANNED:
        rule = "only `trimtab plan` and `trimtab inspect` take this family"
        hint = f"families that are trained: {', '.join(READERS)}"
        raise ArchError("TT201", f"{source}: model_type", rule, value=family, hint=hint)
    raise _unknown_family(family, source, READERS)


def _unknown_family(family: str, source: str, known: Iterable[str]) -> ArchError:
    near = difflib.get_close_matches(family, known, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else "see `trimtab inspect --list`"
    rule = f"not supported; supported families are {', '.join(known)}"
    return ArchError("TT201", f"{source}: model_type", rule, value=family, hint=hint)


def load_outline(config: Mapping[str, object], source: str = "config.json") -> Outline:
    """What the planner needs of a model, also of families that are only planned.

    Raises:
        ArchError: as `load_arch`.
    """
    known = load_known(config, source)
    return known if isinstance(known, Outline) else outline_of(known)


def load_known(config: Mapping[str, object], source: str = "config.json") -> ArchSpec | Outline:
    """The architecture of a family that is trained, the outline of one that is only planned.

    Raises:
        ArchError: as `load_arch`.
    """
    family = config.get("model_type") if isinstance(config, Mapping) else None
    if isinstance(family, str) and family not in READERS:
        if family not in PLANNED:
            raise _unknown_family(family, source, (*READERS, *PLANNED))
        return read_planned(config, source)
    return load_arch(config, source)


def require_readable(arch: ArchSpec, where: str) -> None:
    """Raise if the weights of a model have a stored form that is only recognised.

    Raises:
        ArchError: TT205.
    """
    form = arch.quantization
    if form is not None and not form.readable:
        raise unreadable(form.name, where)


def unreadable(form: str, where: str) -> ArchError:
    """The error of every verb but `inspect` on a stored form that is only recognised."""
    rule = f"weights stored as {form} cannot be read yet; only `trimtab inspect` takes them"
    return ArchError("TT205", where, rule, hint="use the BF16, FP8 or INT4 release of the same model")


def read_arch(path: str | Path) -> ArchSpec:
    """Read the architecture from a config.json file or from the directory that has one.

    Raises:
        ArchError: the file is not JSON or cannot be understood.
        ConfigError: the path does not exist (TT107).
    """
    file, config = read_config(path)
    return load_arch(config, str(file))


def read_config(path: str | Path) -> tuple[Path, dict[str, object]]:
    """The config file that `path` names, and its parsed content.

    Raises:
        ArchError: not a JSON object (TT204).
        ConfigError: the path does not exist (TT107).
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("TT107", str(file), "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("TT107", str(file), f"cannot be read: {error}") from None
    return file, parse_config(text, str(file))


def parse_config(text: str, source: str) -> dict[str, object]:
    """Parse the text of a config.json.

    Raises:
        ArchError: not a JSON object (TT204).
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{source}:{error.lineno}"
        raise ArchError("TT204", where, f"not valid JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise ArchError("TT204", source, "must be a JSON object", value=type(config).__name__)
    return config
