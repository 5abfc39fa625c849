"""Units: the one place that knows 1024 from 1000.

Knows: formatting of bytes, counts and durations. Does not know: anything else.
"""

from __future__ import annotations

import re

_BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> format_bytes(1560860324864)
    '1.42 TiB'
    >>> format_bytes(512)
    '512 B'
    """
    value = float(num_bytes)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def parse_bytes(text: str) -> int:
    """Bytes that a text such as `256MiB`, `16 GB` or `4096` means.

    Raises:
        ValueError: it means none.

    >>> parse_bytes("256MiB")
    268435456
    >>> parse_bytes("1.5 GB")
    1500000000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGTP]i?)?B?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes such as 256MiB or 16GB")
    prefix = (match[2] or "").upper()
    base = 1024 if prefix.endswith("I") else 1000
    power = " KMGTP".index(prefix[0]) if prefix else 0
    return int(float(match[1]) * base**power)


def format_count(count: float) -> str:
    """Counts in decimal units.

    >>> format_count(2779931837184)
    '2.78T'
    >>> format_count(950)
    '950'
    """
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Durations as people say them.

    >>> format_seconds(200)
    '3m 20s'
    >>> format_seconds(4.25)
    '4.2s'
    >>> format_seconds(0.0312)
    '31ms'
    """
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms" if seconds < 0.01 else f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
