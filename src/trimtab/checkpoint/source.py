"""Sources: a checkpoint's config, tensor table and bytes, wherever they lie.

Knows: local directories, single files, fsspec URLs, hub ids, the safetensors index.
Does not know: torch, what tensors mean, how a model is built.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trimtab.arch.load import unreadable
from trimtab.checkpoint.files import FileStore, LocalStore
from trimtab.checkpoint.gguf import GGUFSummary, read_gguf
from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.checkpoint.marker import MARKER_NAME, incomplete, refuse_incomplete
from trimtab.checkpoint.remote import RemoteStore
from trimtab.errors import ArchError, CheckpointError

INDEX_NAME = "model.safetensors.index.json"
GGUF_SUFFIX = ".gguf"
MAX_JSON_BYTES = 256 * 2**20
_SAMPLE_BYTES = 4096
_SAMPLES = 32  # of each kind of tensor
_NUMBER = re.compile(r"\d+")
_REMOTE_THREADS = 8


class Source:
    """A checkpoint that can be asked for its config, its tensors and ranges of their bytes.

    Args:
        store: where the files lie.
        only_file: the single safetensors file to read, None for a whole directory.
    """

    def __init__(self, store: FileStore, only_file: str | None = None) -> None:
        self.store = store
        self._only_file = only_file
        self._entries: dict[str, TensorEntry] | None = None

    @property
    def is_released(self) -> bool:
        """Whether entries say where tensors lie in files of the released layout."""
        return True

    @property
    def where(self) -> str:
        """Directory or URL, for messages."""
        return self.store.root

    def config(self) -> dict[str, Any]:
        """The parsed config.json.

        Raises:
            CheckpointError: TT307 if there is none.
            ArchError: TT204 if it is not a JSON object.
        """
        if not self.has_file("config.json"):
            raise CheckpointError(
                "TT307", self.where, "has no config.json",
                hint="name a directory with config.json and *.safetensors",
            )
        return self._json("config.json")

    def has_weights(self) -> bool:
        """Whether there is anything for `entries` to read."""
        return bool(self._only_file or self.has_file(INDEX_NAME) or self._weight_files())

    def has_file(self, name: str) -> bool:
        """Whether a file of this name is in the directory."""
        return self.store.size(name) is not None

    def read_file(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """All bytes of a small file such as config.json or tokenizer.json.

        Raises:
            CheckpointError: TT307 if it is missing, TT301 if it is above `limit` bytes.
        """
        size = self.store.size(name)
        if size is None:
            raise CheckpointError("TT307", f"{self.where}/{name}", "does not exist")
        if size > limit:
            raise CheckpointError("TT301", f"{self.where}/{name}", f"must be at most {limit} bytes",
                                  value=size)
        return bytes(self.store.read_at(name, 0, size))

    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor of every weight file, read from the headers once.

        Raises:
            CheckpointError: TT301 damaged file, TT302 file or tensor that the index names is
                missing, TT307 no weights, TT308 two files hold the same tensor.
        """
        if self._entries is None:
            self._entries = self._read_entries()
        return self._entries

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """Bytes `start` to `start + length` of a tensor, to its end without `length`.

        Raises:
            CheckpointError: TT302 if there is no such tensor, TT301 if the file ends early.
        """
        entry = self._entry(name)
        length = entry.num_bytes - start if length is None else length
        raw = bytearray(length)
        self.read_into(name, start, memoryview(raw))
        return raw

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a tensor from `start` on.

        Raises:
            CheckpointError: TT302 if there is no such tensor, TT301 if the file ends early or
                cannot be read.
        """
        entry = self._entry(name)
        if start < 0 or start + len(out) > entry.num_bytes:
            raise ValueError(f"{name}: range {start}+{len(out)} is outside {entry.num_bytes} bytes")
        self._read_range(entry, name, start, out)

    def _read_range(self, entry: TensorEntry, name: str, start: int, out: memoryview) -> None:
        where = f"{self.where}/{entry.file}: {name}"
        try:
            count = self.store.read_into(entry.file, entry.begin + start, out)
        except CheckpointError as error:
            raise CheckpointError(
                error.code, where, error.rule, value=error.value, hint=error.hint
            ) from error
        if count != len(out):
            rule = f"expected {len(out)} bytes at {entry.begin + start}, found {count}"
            raise CheckpointError("TT301", where, rule, hint="copy or download the file again")

    def _entry(self, name: str) -> TensorEntry:
        entry = self.entries().get(name)
        if entry is None:
            raise CheckpointError("TT302", f"{self.where}: {name}", "tensor is in no file")
        return entry

    def files(self) -> tuple[str, ...]:
        """Names of the weight files in use, sorted."""
        return tuple(sorted({entry.file for entry in self.entries().values()}))

    def state(self, file: str) -> str:
        """A text that changes when a weight file does: its size, and time or tag of the change."""
        return self.store.state(file)

    def fingerprint(self) -> str:
        """Hash of what the checkpoint holds, however it is cut into files.

        It covers name, dtype and shape of every tensor in the order of names, and 4 KiB from the
        middle of 32 tensors of each kind, evenly spread over that order, or of all where there are
        fewer; a kind are names that differ in numbers only, so that many experts do not hide a
        changed projection. The same weights have the same fingerprint in any layout, and weights of
        another stored form have another one.
        """
        digest = hashlib.sha256()
        entries = sorted(self.entries().items())
        for name, entry in entries:
            digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        kinds: dict[str, list[tuple[str, TensorEntry]]] = {}
        for item in entries:
            kinds.setdefault(_NUMBER.sub("#", item[0]), []).append(item)
        sample = [item for kind in kinds.values() for item in kind[:: -(-len(kind) // _SAMPLES)]]
        threads = 1 if isinstance(self.store, LocalStore) else _REMOTE_THREADS
        with ThreadPoolExecutor(threads) as pool:
            for middle in pool.map(lambda item: self._middle(*item), sample):
                digest.update(middle)
        return digest.hexdigest()

    def _middle(self, name: str, entry: TensorEntry) -> bytearray:
        count = min(_SAMPLE_BYTES, entry.num_bytes)
        return self.read(name, (entry.num_bytes - count) // 2, count)

    def local_path(self, file: str) -> Path | None:
        """Path of a file of the directory, None where it is not on this machine."""
        return Path(self.where) / file if isinstance(self.store, LocalStore) else None

    def names(self) -> tuple[str, ...]:
        """Names of all files of the directory, none where the store cannot say."""
        return tuple(sorted(self.store.list() or ()))


    def _json(self, name: str) -> dict[str, Any]:
        raw = self.read_file(name)
        try:
            value = json.loads(raw)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ArchError("TT204", f"{self.where}/{name}", f"not valid JSON: {error}") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise ArchError("TT204", f"{self.where}/{name}", f"must be a JSON object, is {kind}")
        return value

    def gguf_files(self) -> list[str]:
        """Files of the GGUF format in the directory, which Trimtab only recognises."""
        return sorted(name for name in self.store.list() or () if name.endswith(GGUF_SUFFIX))

    def summarise_gguf(self, name: str) -> GGUFSummary:
        """What the header of a GGUF file says.

        Raises:
            CheckpointError: TT301 if it is damaged, TT307 if it is missing.
        """
        size = self.store.size(name)
        if size is None:
            raise CheckpointError("TT307", f"{self.where}/{name}", "does not exist")
        return read_gguf(partial(self.store.read_at, name), size, name)

    def _weight_files(self) -> list[str]:
        listed = self.store.list()
        if listed is None:  # plain HTTP has no listing
            return ["model.safetensors"] if self.has_file("model.safetensors") else []
        return sorted(name for name in listed if name.endswith(".safetensors"))

    def _index(self) -> dict[str, str] | None:
        if self._only_file or not self.has_file(INDEX_NAME):
            return None
        where = f"{self.where}/{INDEX_NAME}"
        weight_map = self._json(INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError("TT301", where, "weight_map must be a non-empty object")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _stays_inside(file):
                rule = "file must be a relative path inside the directory"
                raise CheckpointError("TT301", f"{where}: {name}", rule, value=file)
        return weight_map

    def _read_entries(self) -> dict[str, TensorEntry]:
        index = self._index()
        if index is not None:
            files = sorted(set(index.values()))
        else:
            files = [self._only_file] if self._only_file else self._weight_files()
        if not files and self.gguf_files():
            raise unreadable("GGUF", self.where)
        if not files:
            raise CheckpointError(
                "TT307", self.where, "holds no *.safetensors file",
                hint="name a directory with config.json and *.safetensors",
            )
        merged: dict[str, TensorEntry] = {}
        for header in self._read_headers(files):
            for name, entry in header.items():
                if name in merged:
                    rule = f"is in {merged[name].file} and in {entry.file}"
                    hint = "remove the stale file; the index names the right one"
                    raise CheckpointError("TT308", f"{self.where}: {name}", rule, hint=hint)
                merged[name] = entry
        for name, file in (index or {}).items():
            if name not in merged or merged[name].file != file:
                rule = f"the index places it in {file}, which does not hold it"
                raise CheckpointError("TT302", f"{self.where}: {name}", rule,
                                      hint="download the index and that file again")
        return merged

    def _read_headers(self, files: list[str]) -> list[dict[str, TensorEntry]]:
        if isinstance(self.store, LocalStore) or len(files) == 1:
            return [self._read_one_header(file) for file in files]
        with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
            return list(pool.map(self._read_one_header, files))

    def _read_one_header(self, file: str) -> dict[str, TensorEntry]:
        size = self.store.size(file)
        if size is None:
            raise CheckpointError(
                "TT302", f"{self.where}/{file}", "the index names this file, it does not exist",
                hint="download the missing file",
            )
        return read_header(partial(self.store.read_at, file), size, file)


def open_source(path: str | Path) -> Source:
    """Open a checkpoint for reading.

    Args:
        path: local directory, one .safetensors file, any fsspec URL (`https://`, `s3://`,
            `obs://`, `memory://`, ...), or a hub id `owner/name` if no such directory exists.

    Raises:
        CheckpointError: TT307 if nothing is there, TT305 if a writer of ours left it incomplete,
            TT604 if the URL needs a package that is not installed.
        ArchError: TT205 for a GGUF file.
    """
    text = str(path)
    if "://" in text:
        return _open_remote(text)
    local = Path(path).expanduser()
    if local.is_dir():
        refuse_incomplete(local)
        return _of_directory(LocalStore(local))
    if local.suffix == GGUF_SUFFIX:
        raise unreadable("GGUF", text)
    if local.is_file():
        if local.suffix != ".safetensors":
            raise CheckpointError("TT307", text, "must be a directory or a .safetensors file")
        return Source(LocalStore(local.parent), local.name)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) and not local.parent.is_dir():
        return _open_remote(f"hf://{text}")
    raise CheckpointError("TT307", text, "does not exist",
                          hint="name a directory with config.json and *.safetensors")


def _open_remote(url: str) -> Source:
    head, _, tail = url.rstrip("/").rpartition("/")
    if tail.endswith(".safetensors"):
        return Source(RemoteStore(head), tail)
    store = RemoteStore(url.rstrip("/"))
    if store.size(MARKER_NAME) is not None:
        raise incomplete(store.root)
    return _of_directory(store)


def _of_directory(store: FileStore) -> Source:
    from trimtab.checkpoint.converted import ConvertedSource  # it is a Source itself
    from trimtab.checkpoint.layout import LAYOUT_NAME

    is_converted = store.size(LAYOUT_NAME) is not None
    return ConvertedSource(store) if is_converted else Source(store)


def _stays_inside(file: str) -> bool:
    parts = PurePosixPath(file)
    return bool(file) and not parts.is_absolute() and ".." not in parts.parts and "\\" not in file
