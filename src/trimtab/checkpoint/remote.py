"""Remote directories behind fsspec URLs: ranges in parallel, again after a failure.

Knows: fsspec, which of its failures are told how. Does not know: what files mean; which failures
pass (see `trimtab.network`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from trimtab.errors import CheckpointError
from trimtab.network import redact, retried

MAX_RANGE_BYTES = 8 * 2**20
_THREADS = 8
_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "hf": "hub"}
_MODELSCOPE = "https://modelscope.cn/models"
_REACH = "check the network, the address and the credentials"
# OBS answers under the name of the bucket only.
_OBS_ADDRESSING = "virtual"

Value = TypeVar("Value")


class FileSystem(Protocol):
    """What is used of an fsspec file system."""

    protocol: str | tuple[str, ...]

    def size(self, path: str) -> int | None:
        """Bytes of a file."""

    def info(self, path: str) -> dict[str, object]:
        """What the store says of a file."""

    def ls(self, path: str, detail: bool = ...) -> list[dict[str, object]]:
        """What a directory holds."""

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Bytes of a range."""

    def pipe_file(self, path: str, value: bytes) -> None:
        """Write a whole file."""

    def rm_file(self, path: str) -> None:
        """Remove a file."""

    def rm(self, path: str, recursive: bool) -> None:
        """Remove a directory."""

    def open(self, path: str, mode: str, block_size: int) -> IO[bytes]:
        """Open a file for writing."""


def connect(url: str) -> tuple[FileSystem, str]:
    """The file system of a URL and the path in it.

    `obs://bucket/path` is the S3 interface of Huawei OBS: OBS_ENDPOINT names its endpoint,
    OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY the key, if set. `modelscope://owner/name`, with
    `@revision` if not `master`, is read over HTTPS.

    Raises:
        CheckpointError: TT604 if the protocol needs a package that is not installed, TT307 if
            the URL has a protocol that fsspec does not know.
    """
    import fsspec  # type: ignore[import-untyped] # it ships no types

    shown = redact(url)
    options: dict[str, object] = {}
    if url.startswith("obs://"):
        url = "s3://" + url.removeprefix("obs://")
        options = obs_options(shown)
    if url.startswith("modelscope://"):
        url = modelscope_url(url)
    if url.startswith("s3://"):
        # Listings that are kept would hide what another host of the same conversion has written.
        options["use_listings_cache"] = False
        # The client below s3fs would repeat every repetition of s3fs, up to a minute each.
        client = dict(cast(dict[str, object], options.get("config_kwargs", {})))
        options["config_kwargs"] = {**client, "retries": {"max_attempts": 1}}
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        hint = f"pip install 'trimtab[{extra}]'" if extra else "install what fsspec names"
        raise CheckpointError("TT604", shown, str(error), hint=hint) from error
    except ValueError as error:
        hint = "such as https://, s3://, obs://, hf:// or modelscope://"
        raise CheckpointError("TT307", shown, _clean(url, error), hint=hint) from error
    return cast(FileSystem, system), str(path)


class RemoteStore:
    """A directory behind an fsspec URL.

    Args:
        url: any URL that fsspec knows, or `obs://`.

    Raises:
        CheckpointError: see `connect`.
    """

    def __init__(self, url: str) -> None:
        self.root = redact(url)
        self._url = url
        self._fs, self._path = connect(url)
        self._pool: ThreadPoolExecutor | None = None
        self._readers: ThreadPoolExecutor | None = None

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist.

        Raises:
            CheckpointError: TT307 if the store does not answer or does not tell the size.
        """
        path = f"{self._path}/{name}"
        try:
            size = self._ask("", "TT307", "no answer", lambda: self._fs.size(path), _REACH)
        except FileNotFoundError:
            return None
        if size is None:
            raise CheckpointError("TT307", f"{self.root}/{name}", "the server tells no size")
        return int(size)

    def list(self) -> list[str] | None:
        """Names of the files directly inside, None over HTTP, which cannot say."""
        if "http" in self._fs.protocol:
            return None
        try:
            found = self._ask(
                "", "TT307", "cannot be listed", lambda: self._fs.ls(self._path, detail=True), _REACH
            )
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [str(row["name"]).rsplit("/", 1)[-1] for row in found if row["type"] == "file"]

    def state(self, name: str) -> str:
        """Size and, where the store gives one, tag or time of the last change of a file."""
        info = self._ask(
            name, "TT301", "cannot be read", lambda: self._fs.info(f"{self._path}/{name}")
        )
        keys = ("size", "ETag", "etag", "LastModified", "mtime", "created")
        return " ".join(str(info[key]) for key in keys if info.get(key) is not None)

    def read_at(self, name: str, offset: int, length: int) -> bytearray:
        """Bytes from `offset`, fewer than `length` only at the end of the file.

        Raises:
            CheckpointError: TT301 if the store fails or ignores the range.
        """
        buffer = bytearray(length)
        view = memoryview(buffer)
        count = self.read_into(name, offset, view)
        view.release()
        del buffer[count:]
        return buffer

    def read_into(self, name: str, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset`; returns the bytes read, fewer only at the end of the file.

        Long ranges are asked for in several requests at a time.

        Raises:
            CheckpointError: TT301 if the store fails or ignores the range.
        """
        if len(out) <= MAX_RANGE_BYTES:
            return self._read_range(name, offset, out)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS)
        starts = range(0, len(out), MAX_RANGE_BYTES)
        cuts = [out[start : start + MAX_RANGE_BYTES] for start in starts]
        offsets = [offset + start for start in starts]
        done = 0
        for cut, count in zip(
            cuts, self._pool.map(self._read_range, [name] * len(cuts), offsets, cuts), strict=True
        ):
            done += count
            if count < len(cut):
                break
        return done

    def spread(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls that read at the same time: each waits for an answer most of its time."""
        if len(calls) == 1:
            calls[0]()
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(2 * _THREADS)
        for done in [self._readers.submit(call) for call in calls]:
            done.result()

    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole.

        Raises:
            CheckpointError: TT314 if the store refuses.
        """
        path = f"{self._path}/{name}"
        self._ask(name, "TT314", "cannot be written", lambda: self._fs.pipe_file(path, data))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        path = f"{self._path}/{name}"
        with suppress(FileNotFoundError):
            self._ask(name, "TT314", "cannot be removed", lambda: self._fs.rm_file(path))

    def remove_tree(self, name: str) -> None:
        """Remove a directory if it exists."""
        path = f"{self._path}/{name}"
        with suppress(FileNotFoundError):
            self._ask(name, "TT314", "cannot be removed", lambda: self._fs.rm(path, recursive=True))

    @contextmanager
    def upload(self, name: str, part_bytes: int) -> Iterator[IO[bytes]]:
        """A file being written in parts; it appears when all of it is there, or not at all.

        Raises:
            CheckpointError: TT314 if the store fails.
        """
        where = f"{self.root}/{name}"
        try:
            handle = self._fs.open(f"{self._path}/{name}", "wb", block_size=part_bytes)
            try:
                yield handle
            except BaseException:
                _discard(handle)
                raise
            handle.close()
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a store raises
            rule = f"cannot be written: {_clean(self._url, error)}"
            hint = "finished files are kept; run the same command again"
            raise CheckpointError("TT314", where, rule, hint=hint) from None

    def _read_range(self, name: str, offset: int, out: memoryview) -> int:
        if not out:
            return 0
        path, wanted = f"{self._path}/{name}", len(out)

        def get() -> bytes:
            raw = self._fs.cat_file(path, start=offset, end=offset + wanted)
            if len(raw) < wanted and offset + wanted <= (self._fs.size(path) or 0):
                raise ConnectionError(f"got {len(raw)} of {wanted} bytes")
            return raw

        try:
            raw = self._ask(name, "TT301", "range cannot be read", get)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError("TT301", f"{self.root}/{name}", "does not exist") from error
        if len(raw) > wanted:
            rule = f"asked for {wanted} bytes, got {len(raw)}; the server must support ranges"
            raise CheckpointError("TT301", f"{self.root}/{name}", rule)
        out[: len(raw)] = raw
        return len(raw)

    def _ask(
        self, name: str, code: str, rule: str, call: Callable[[], Value], hint: str | None = None
    ) -> Value:
        """The value of a call, retried; failures are told without secrets, so without a cause."""
        try:
            return retried(call)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever a store raises
            where = f"{self.root}/{name}" if name else self.root
            rule = f"{rule}: {_clean(self._url, error)}"
            raise CheckpointError(code, where, rule, hint=hint) from None


def _discard(handle: IO[bytes]) -> None:
    """End an upload so that nothing of it appears."""
    discard = getattr(handle, "discard", None)
    with suppress(Exception):
        if discard is not None:
            discard()
        # An fsspec file that is garbage collected would upload the rest of its buffer.
        handle.closed = True  # type: ignore[misc]


def _clean(url: str, error: Exception) -> str:
    """The text of an error without the secrets of a URL and of signed requests."""
    text = str(error) or type(error).__name__
    parts = urlsplit(url)
    for secret in (parts.query, parts.username, parts.password):
        if secret:
            text = text.replace(secret, "***")
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "OBS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        if os.environ.get(name):
            text = text.replace(os.environ[name], "***")
    return re.sub(
        r"(?i)((?:signature|credential|token|accesskeyid|security)[\w-]*=)[^&\s'\"]+", r"\1***", text
    )


def modelscope_url(url: str) -> str:
    """Where ModelScope serves the files of a model.

    >>> modelscope_url("modelscope://owner/name@v1.0")
    'https://modelscope.cn/models/owner/name/resolve/v1.0'

    Raises:
        CheckpointError: TT307 if no owner and name follow.
    """
    found = re.fullmatch(r"modelscope://([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?:/[\w.-]+)*)/?", url)
    if found is None:
        raise CheckpointError("TT307", redact(url), "must be modelscope://OWNER/NAME[@REVISION]")
    return f"{_MODELSCOPE}/{found[1]}/resolve/{found[2] or 'master'}{found[3]}"


def obs_options(shown: str) -> dict[str, object]:
    """What s3fs needs to know to reach Huawei OBS.

    Raises:
        CheckpointError: TT307 if OBS_ENDPOINT is not set.
    """
    endpoint = os.environ.get("OBS_ENDPOINT")
    if not endpoint:
        raise CheckpointError("TT307", shown, "needs the endpoint of its region in OBS_ENDPOINT",
                              hint="export OBS_ENDPOINT=https://obs.REGION.myhuaweicloud.com")
    options: dict[str, object] = {
        "endpoint_url": endpoint, "config_kwargs": {"s3": {"addressing_style": _OBS_ADDRESSING}},
    }
    if os.environ.get("OBS_ACCESS_KEY_ID"):
        options["key"] = os.environ["OBS_ACCESS_KEY_ID"]
        options["secret"] = os.environ.get("OBS_SECRET_ACCESS_KEY")
    return options
