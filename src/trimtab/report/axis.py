"""Axes: round tick values, their labels, and the smoothing of noisy curves.

Knows: numbers. Does not know: drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover `low` to `high` in about `count` steps of 1, 2 or 5 times 10^n.

    >>> ticks(0.03, 0.97)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(1, 90)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_label(value: float) -> str:
    """A number as an axis shows it.

    >>> [tick_label(v) for v in (0.0, 0.25, 40.0, 12000.0, 0.0005)]
    ['0', '0.25', '40', '12k', '5e-4']
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def smooth(values: Sequence[float], weight: float = 0.6) -> list[float]:
    """Exponential moving average without bias towards zero at the start.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    out: list[float] = []
    mean, norm = 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(mean / norm)
    return out
