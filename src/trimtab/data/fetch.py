"""Images behind http(s) URLs: fetched once within limits, and kept by their URL.

Knows: HTTP, the user's cache. Does not know: records, recipes, pixels.

A kept file lies at the SHA-256 of its URL, so that a second epoch and a run that goes on read the
bytes of the first time and ask nobody. What failed is not asked for again by the same process: later
epochs would wait for it each time, and leave other records out than the first.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import RunError
from trimtab.network import redact, retried
from trimtab.user_cache import user_cache

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientTimeout

ATTEMPTS = 4
MAX_REDIRECTS = 5
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 20.0  # between two pieces of an answer
TOTAL_SECONDS = 120.0
_PIECE = 2**16
_failed: dict[str, Exception] = {}  # by URL


class FetchError(Exception):
    """An address gives nothing that can be used; the text tells why, without the address."""


def fetched(url: str, max_bytes: int, check: Callable[[bytes], object]) -> bytes:
    """What an address gives, from the cache where it was fetched before.

    Args:
        url: http or https.
        max_bytes: of the answer, unpacked.
        check: called with a new answer before it is kept; what it raises is passed on.

    Raises:
        FetchError: no server, an error status, too many bytes, too slow, too many redirects.
        RunError: TT604 if aiohttp is missing, TT314 if the cache cannot be used.
    """
    name = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()
    kept = user_cache("images") / name[:2] / name
    try:
        if kept.is_file():
            return kept.read_bytes()
        return _keep(kept, _checked(url, max_bytes, check))
    except OSError as error:
        hint = "TRIMTAB_CACHE names the directory of what is fetched"
        rule = f"cannot be read or written: {error.strerror}"
        raise RunError("TT314", str(kept.parent), rule, hint=hint) from error


def _checked(url: str, max_bytes: int, check: Callable[[bytes], object]) -> bytes:
    if url in _failed:
        raise _failed[url].with_traceback(None)
    try:
        data = _download(url, max_bytes)
        check(data)
    except RunError:
        raise
    except Exception as error:
        _failed[url] = error
        raise
    return data


def _keep(path: Path, data: bytes) -> bytes:
    """Place a file whole unless another process was first; what then lies there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return path.read_bytes()
        except OSError:  # a file system without links
            os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return data


def _download(url: str, max_bytes: int) -> bytes:
    try:
        import aiohttp
        import fsspec  # type: ignore[import-untyped] # it ships no types
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        system = fsspec.filesystem("http")
    except ImportError as error:
        hint = "pip install 'trimtab[http]'"
        raise RunError("TT604", redact(url), f"needs a package: {error}", hint=hint) from None
    limits = aiohttp.ClientTimeout(TOTAL_SECONDS, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)

    async def get() -> bytes:
        return await _read(await system.set_session(), url, max_bytes, limits)

    def ask() -> bytes:
        answer: bytes = sync(system.loop, get)
        return answer

    try:
        return retried(ask, ATTEMPTS)
    except FetchError:
        raise
    except aiohttp.ClientResponseError as error:
        raise FetchError(f"the server answers {error.status} {error.message}".rstrip()) from None
    except TimeoutError:
        seconds = f"{SILENCE_SECONDS:g} s for a piece, {TOTAL_SECONDS:g} s in all"
        raise FetchError(f"the server is too slow ({seconds})") from None
    except aiohttp.ClientConnectorError as error:
        raise FetchError(f"no answer: {error}") from None
    except Exception as error:  # noqa: BLE001  # whatever a client raises; its text may tell the URL
        raise FetchError(f"no answer: {type(error).__name__}") from None


async def _read(session: ClientSession, url: str, max_bytes: int, limits: ClientTimeout) -> bytes:
    """One request. What does not pass is a ValueError, which is not asked for again."""
    import aiohttp

    too_large = _RefusedError(f"has more than {max_bytes:,} bytes")
    try:
        async with session.get(url, max_redirects=MAX_REDIRECTS, timeout=limits) as response:
            response.raise_for_status()
            if (response.content_length or 0) > max_bytes:
                raise too_large
            data = bytearray()
            async for piece in response.content.iter_chunked(_PIECE):
                data += piece
                if len(data) > max_bytes:
                    raise too_large
            return bytes(data)
    except aiohttp.TooManyRedirects:
        raise _RefusedError(f"redirects {MAX_REDIRECTS} times in a row") from None
    except aiohttp.NonHttpUrlRedirectClientError:
        raise _RefusedError("redirects to something other than http or https") from None
    except aiohttp.InvalidURL:
        raise _RefusedError("is no valid address, or redirects to none") from None


class _RefusedError(FetchError, ValueError):
    """Would not be otherwise if asked again."""
