"""What `trimtab inspect` shows of GGUF files, which no other verb takes.

Knows: how their headers are summed and printed. Does not know: their layout (see
`checkpoint.gguf`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trimtab.checkpoint.files import LocalStore
from trimtab.checkpoint.gguf import GGUFSummary
from trimtab.checkpoint.source import GGUF_SUFFIX, Source, open_source
from trimtab.units import format_bytes, format_count

_UNSUPPORTED = "weights stored as GGUF: shown here, refused by every other verb"


@dataclass(frozen=True, slots=True)
class GGUFTarget:
    """Files of the format.

    Args:
        where: file or directory.
        files: one summary per file.
    """

    where: str
    files: tuple[GGUFSummary, ...]


def find_gguf(text: str) -> GGUFTarget | None:
    """The GGUF files that a target names: one, or those of a local directory without safetensors.

    Raises:
        CheckpointError: TT301 if a header is damaged.
    """
    path = Path(text).expanduser()
    if "://" in text and text.endswith(GGUF_SUFFIX):
        directory, _, name = text.rpartition("/")
        return _summarise(text, open_source(directory), [name])
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return _summarise(text, Source(LocalStore(path.parent)), [path.name])
    if path.is_dir():
        source = Source(LocalStore(path))
        names = source.gguf_files()
        if names and not source.has_weights():
            return _summarise(text, source, names)
    return None


def _summarise(where: str, source: Source, names: list[str]) -> GGUFTarget:
    return GGUFTarget(where, tuple(source.summarise_gguf(name) for name in names))


def print_gguf(target: GGUFTarget, as_json: bool) -> None:
    """Print sums over the files, as one JSON object or in words."""
    by_type: Counter[str] = Counter()
    for file in target.files:
        by_type.update(file.bytes_by_type)
    architectures = [file.architecture for file in target.files if file.architecture]
    values: dict[str, object] = {
        "target": target.where,
        "model_type": architectures[0] if architectures else None,
        "quantization": "GGUF",
        "total_parameters": sum(file.parameters for file in target.files),
        "num_tensors": sum(file.num_tensors for file in target.files),
        "stored_bytes": sum(file.num_bytes for file in target.files),
        "bytes_by_dtype": dict(by_type.most_common()),
        "files": len(target.files),
        "unsupported": [_UNSUPPORTED],
    }
    if as_json:
        sys.stdout.write(json.dumps(values) + "\n")
        return
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in by_type.most_common())
    parameters = sum(file.parameters for file in target.files)
    tensors = sum(file.num_tensors for file in target.files)
    sys.stdout.write(
        f"{values['model_type'] or 'unnamed architecture'}, GGUF: {format_count(parameters)} "
        f"parameters, {format_bytes(by_type.total())}, {tensors:,} tensors\n"
        f"by type  {parts}\nnot supported yet: {_UNSUPPORTED}\n"
    )
