"""Small files of a checkpoint: from a local directory, an fsspec URL or a hub id.

Knows: where a checkpoint may lie. Does not know: what its files mean.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from trimtab.arch.load import unreadable
from trimtab.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def read_bytes(model_dir: str | Path, name: str) -> bytes | None:
    """Content of a file; None where there is none.

    Raises:
        DataError: TT604 where a package is missing to reach it, TT405 where it cannot be read.
        ArchError: TT205 where a GGUF file stands for the checkpoint.
    """
    if str(model_dir).endswith(".gguf"):
        raise unreadable("GGUF", str(model_dir))
    where = f"{str(model_dir).rstrip('/')}/{name}"
    try:
        return _fetch(str(model_dir), name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ImportError as error:
        hint = "pip install 'trimtab[http]' (or [s3], [hub], or the package fsspec names)"
        rule = str(error)
        if "://" not in where:
            rule = f"is no local directory, and to read it as a hub id: {error}"
        raise DataError("TT604", where, rule, hint=hint) from None
    except Exception as error:
        # Each file system behind fsspec has errors of its own.
        raise DataError("TT405", where, f"cannot be read: {error}") from error


def read_text(model_dir: str | Path, name: str) -> str | None:
    """Text of a file; None where there is none.

    Raises:
        DataError: as `read_bytes`, and TT405 where it is not UTF-8.
    """
    data = read_bytes(model_dir, name)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        where = f"{str(model_dir).rstrip('/')}/{name}"
        raise DataError("TT405", where, "is not UTF-8 text") from None


def read_json(model_dir: str | Path, name: str) -> dict[str, object] | None:
    """The object of a JSON file; None where there is no file.

    Raises:
        DataError: as `read_text`, and TT405 where it is not one JSON object.
    """
    text = read_text(model_dir, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{model_dir}/{name}:{error.lineno}"
        raise DataError("TT405", where, f"not valid JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise DataError("TT405", f"{model_dir}/{name}", "must hold one JSON object")
    return value


def _fetch(model_dir: str, name: str) -> bytes:
    remote = "://" in model_dir
    if not remote and (Path(model_dir).exists() or not _HUB_ID.fullmatch(model_dir)):
        return (Path(model_dir) / name).read_bytes()
    from fsspec.core import url_to_fs  # type: ignore[import-untyped] # it ships no types

    filesystem, root = url_to_fs(model_dir if remote else f"hf://{model_dir}")
    data: bytes = filesystem.cat_file(f"{root.rstrip('/')}/{name}")
    return data
