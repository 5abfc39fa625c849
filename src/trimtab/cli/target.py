"""What `inspect` was asked about: a preset, a config file, a directory, a URL or a hub id.

Knows: how the words on the command line become a config and, where weights are, a tensor table.
Does not know: how the result is shown. Only headers and index are read, never tensors.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.arch.load import load_known, load_outline, parse_config, read_config
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config, preset_names
from trimtab.arch.spec import ArchSpec
from trimtab.errors import ConfigError

if TYPE_CHECKING:
    from trimtab.checkpoint.source import Source


@dataclass(frozen=True, slots=True)
class Weights:
    """What the headers of a checkpoint say, compared with the inventory.

    Args:
        files: weight files.
        num_tensors: tensors in them.
        num_bytes: their bytes, headers not counted.
        differences: every difference, as plain values for JSON.
        lines: the same in words, whole experts and layers drawn together.
        skipped: tensors among them that belong to no layer any verb reads.
        is_compared: False where the stored form is only recognised, so that nothing was compared.
    """

    files: int
    num_tensors: int
    num_bytes: int
    differences: tuple[Mapping[str, str], ...]
    lines: tuple[str, ...]
    skipped: int = 0
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """A model to inspect.

    Args:
        kind: `preset`, `config`, `directory` or `remote`.
        where: the preset's name, the file or the URL.
        arch: the architecture its config describes, an outline where the family is only planned.
        weights: None where only a config was given.
    """

    kind: str
    where: str
    arch: ArchSpec | Outline
    weights: Weights | None = None


def resolve(text: str) -> Target:
    """Find out what `text` names and read it.

    Paths come first, then presets, then hub ids.

    Raises:
        ConfigError: nothing of that name exists (TT107).
        ArchError: its config cannot be understood.
        CheckpointError: its headers are damaged, or its URL needs a package that is missing.
    """
    if "://" in text:
        return _remote_config(text) if text.endswith(".json") else _checkpoint("remote", text)
    path = Path(text).expanduser()
    if path.is_dir():
        return _checkpoint("directory", str(path))
    if path.is_file() and path.suffix != ".safetensors":
        file, config = read_config(path)
        return Target("config", str(file), load_known(config, str(file)))
    if path.is_file():
        return _checkpoint("directory", str(path))
    if text in preset_names():
        return Target("preset", text, load_known(preset_config(text), f"preset {text}"))
    if _may_be_hub_id(text, path):
        _require_hub(text)
        return _checkpoint("remote", text)
    raise _no_such(text)


def resolve_outline(text: str) -> Outline:
    """What the planner needs of the model that `text` names; only its config is read.

    Raises:
        ConfigError: nothing of that name exists (TT107).
        ArchError: its config cannot be understood.
    """
    path = Path(text).expanduser()
    if "://" not in text and (path.is_dir() or path.is_file()):
        file, config = read_config(path)
        return load_outline(config, str(file))
    if text in preset_names():
        return load_outline(preset_config(text), f"preset {text}")
    if "://" in text or _may_be_hub_id(text, path):
        from trimtab.checkpoint.source import open_source  # only for URLs and hub ids

        if "://" not in text:
            _require_hub(text)
        directory, _, name = text.rpartition("/")
        if not text.endswith(".json"):
            directory, name = text, "config.json"
        source = open_source(directory)
        content = source.read_file(name).decode("utf-8", errors="replace")
        return load_outline(parse_config(content, text), text)
    raise _no_such(text)


def _no_such(text: str) -> ConfigError:
    near = difflib.get_close_matches(text, preset_names(), n=1, cutoff=0.6)
    hint = f"did you mean the preset `{near[0]}`?" if near else "see `trimtab inspect --list`"
    return ConfigError("TT107", text, "no such file, directory or preset", hint=hint)


def _may_be_hub_id(text: str, path: Path) -> bool:
    """`owner/name` where no local folder `owner` exists and `name` is no file."""
    parts = text.split("/")
    is_pair = len(parts) == 2 and all(parts) and not text.startswith((".", "/", "~"))
    return is_pair and not path.parent.is_dir() and path.suffix not in (".json", ".safetensors")


def _require_hub(text: str) -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            "TT604", text, "no such file, directory or preset; as a hub id it needs huggingface_hub",
            hint="pip install 'trimtab[hub]', or name a local directory",
        )


def _checkpoint(kind: str, text: str) -> Target:
    from trimtab.checkpoint.source import open_source  # only with weights

    source = open_source(text)
    arch = load_known(source.config(), f"{source.where}/config.json")
    weights = _compare(arch, source) if source.has_weights() else None
    return Target(kind, source.where, arch, weights)


def _compare(arch: ArchSpec | Outline, source: Source) -> Weights:
    entries = source.entries()
    if isinstance(arch, Outline):
        total = sum(entry.num_bytes for entry in entries.values())
        return Weights(len(source.files()), len(entries), total, (), (), is_compared=False)
    from trimtab.checkpoint.structure import compare, is_skipped, summarize  # only with weights

    readable = arch.quantization is None or arch.quantization.readable
    differences = compare(arch, entries) if readable else []
    return Weights(
        files=len(source.files()),
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        differences=tuple(difference.as_dict() for difference in differences),
        lines=tuple(summarize(arch, differences)),
        skipped=sum(is_skipped(arch, name) for name in entries),
        is_compared=readable,
    )


def _remote_config(url: str) -> Target:
    from trimtab.checkpoint.source import open_source  # only for URLs

    directory, _, name = url.rpartition("/")
    text = open_source(directory).read_file(name).decode("utf-8", errors="replace")
    return Target("config", url, load_known(parse_config(text, url), url))
