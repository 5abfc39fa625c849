"""The files that a checkpoint was released in, whatever layout it lies in.

Knows: file names, order of tensors and headers of a release, and the document that keeps them in a
converted directory. Does not know: torch, values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.checkpoint.source import INDEX_NAME, Source
from trimtab.errors import CheckpointError

RELEASED_NAME = "released.json"
SINGLE_FILE_BYTES = 5 * 10**9
"""Up to this size weights that are written anew lie in one file."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ReleasedFile:
    """One weight file of a release.

    Args:
        name: file name.
        header: its bytes before the first tensor; None where nobody has kept it.
        tensors: names and entries, in file order.
        twin: the file of the source that is this one byte for byte, None where there is none.
    """

    name: str
    header: bytes | None
    tensors: tuple[tuple[str, TensorEntry], ...]
    twin: str | None


def released_files(source: Source) -> list[ReleasedFile]:
    """The weight files of a release, sorted by name.

    A converted directory keeps their headers; one that was cast has others instead.

    Raises:
        CheckpointError: TT306 where what a converted directory keeps does not fit its tensors.
    """
    if source.is_released:
        return [_as_it_lies(source, name, found) for name, found in _by_file(source).items()]
    if not source.has_file(RELEASED_NAME):
        return _by_layer(source)
    headers, _ = _document(source)
    found = [_restored(source, name, headers[name]) for name in sorted(headers)]
    if sum(len(file.tensors) for file in found) != len(source.entries()):
        rule = "does not name every tensor of the directory"
        raise CheckpointError("TT306", f"{source.where}/{RELEASED_NAME}", rule)
    return found


def released_index(source: Source) -> bytes | None:
    """The released index of the weight files, None where there is none."""
    if source.is_released:
        return source.read_file(INDEX_NAME) if source.has_file(INDEX_NAME) else None
    if not source.has_file(RELEASED_NAME):
        return None
    _, index = _document(source)
    return None if index is None else index.encode()


def released_document(source: Source) -> bytes | None:
    """What a converted directory keeps of the files it was made from; None if it is not known."""
    if not source.is_released:
        return source.read_file(RELEASED_NAME) if source.has_file(RELEASED_NAME) else None
    index = released_index(source)
    headers = {
        file.name: file.header[8:].decode() for file in released_files(source) if file.header
    }
    document = {"index": None if index is None else index.decode(), "headers": headers}
    return (json.dumps(document, sort_keys=True) + "\n").encode()


def _by_file(source: Source) -> dict[str, list[tuple[str, TensorEntry]]]:
    files: dict[str, list[tuple[str, TensorEntry]]] = {}
    for name, entry in source.entries().items():
        files.setdefault(entry.file, []).append((name, entry))
    return {file: sorted(files[file], key=lambda item: item[1].begin) for file in sorted(files)}


def _as_it_lies(
    source: Source, file: str, found: Sequence[tuple[str, TensorEntry]]
) -> ReleasedFile:
    header = bytes(source.store.read_at(file, 0, found[0][1].begin))
    return ReleasedFile(file, header, tuple(found), file)


def _restored(source: Source, file: str, text: str) -> ReleasedFile:
    raw = text.encode()
    header = len(raw).to_bytes(8, "little") + raw
    entries, where = source.entries(), f"{source.where}/{RELEASED_NAME}: {file}"
    size = len(header) + max(
        (value["data_offsets"][1] for name, value in json.loads(raw).items() if name != "__metadata__"),
        default=0,
    )

    def read_at(offset: int, length: int) -> bytes:
        return header[offset : offset + length]

    tensors = []
    for name, wanted in read_header(read_at, size, file).items():
        entry = entries.get(name)
        if entry is None or (entry.dtype, entry.shape) != (wanted.dtype, wanted.shape):
            raise CheckpointError("TT306", f"{where}: {name}", "is not as the directory has it")
        tensors.append((name, entry))
    return ReleasedFile(file, header, tuple(tensors), None)


def _by_layer(source: Source) -> list[ReleasedFile]:
    """One file, or one a layer where it would be large."""
    entries = sorted(source.entries().items())
    if sum(entry.num_bytes for _, entry in entries) <= SINGLE_FILE_BYTES:
        return [ReleasedFile("model.safetensors", None, tuple(entries), None)]
    layers: dict[int, list[tuple[str, TensorEntry]]] = {}
    for name, entry in entries:
        match = _LAYER.search(name)
        layers.setdefault(-1 if match is None else int(match[1]), []).append((name, entry))
    count = len(layers)
    return [
        ReleasedFile(f"model-{number:05d}-of-{count:05d}.safetensors", None, tuple(layers[layer]), None)
        for number, layer in enumerate(sorted(layers), start=1)
    ]


def _document(source: Source) -> tuple[Mapping[str, str], str | None]:
    """Headers by file, and the index."""
    where = f"{source.where}/{RELEASED_NAME}"
    try:
        document = json.loads(source.read_file(RELEASED_NAME))
        headers, index = dict(document["headers"]), document["index"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError("TT306", where, f"cannot be understood: {error}") from error
    return headers, index
