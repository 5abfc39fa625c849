"""Asking servers: again after a failure that may pass, and what of a URL may be shown.

Knows: how the errors of HTTP and object store clients tell what failed. Does not know: fsspec,
files.

A server that answers late or not at all is asked again with growing pauses; for what is missing or
forbidden it is not. Nothing of a URL that opens a door (user, password, query) reaches a message.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

ATTEMPTS = 6
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 8.0
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

Value = TypeVar("Value")


def redact(url: str) -> str:
    """A URL without what must not be shown: user and password, query.

    >>> redact("https://me:secret@host/dir?X-Signature=abc")
    'https://***@host/dir?***'
    """
    url = re.sub(r"(?<=://)[^/@]*@", "***@", url)
    return re.sub(r"\?.*", "?***", url)


def retried(call: Callable[[], Value], attempts: int | None = None) -> Value:
    """The value of a call, made again after failures that may pass.

    Args:
        call: asks a server.
        attempts: calls at most; `ATTEMPTS` if left out.

    Raises:
        Exception: the last failure, or the first of a kind that does not pass.
    """
    pause = _FIRST_PAUSE
    count = attempts or ATTEMPTS
    for attempt in range(count):
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a store raises
            reason = _reason(error)
            if attempt == count - 1 or isinstance(reason, _PERMANENT) or not _may_pass(reason):
                raise reason from None
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _reason(error: Exception) -> Exception:
    """What stands behind a file that is not found: over HTTP fsspec says so of every failure."""
    behind = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(behind, Exception):
        return error
    return error if isinstance(behind, _PERMANENT) or not _may_pass(behind) else behind


def _may_pass(error: Exception) -> bool:
    """Whether asking again can help: not after an answer in the 400s, but for 408 and 429."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    if status is None and response is not None:
        status = getattr(response, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (408, 429)
    return not isinstance(error, ImportError | TypeError | ValueError | NotImplementedError)
