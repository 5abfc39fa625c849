"""How often to save, and what failures cost.

Knows: the formulas of Young (1974) and Daly (2006). Does not know: models.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Saving:
    """When to save.

    Args:
        mean_time_between_failures: seconds, of the whole job.
        interval: seconds between two saved states that waste the least.
        waste: share of the time that saving, repeated work and restarts take.
    """

    mean_time_between_failures: float
    interval: float
    waste: float


def daly_interval(blocking: float, between_failures: float) -> float:
    """Seconds between saves, by Daly's higher-order estimate.

    Args:
        blocking: seconds that a save stops the job.
        between_failures: mean seconds between failures.

    >>> round(daly_interval(400.0, 8.3 * 86400) / 3600, 1)
    6.6
    """
    if blocking >= 2 * between_failures:
        return between_failures
    ratio = blocking / (2 * between_failures)
    factor = 1 + sqrt(ratio) / 3 + ratio / 9
    return sqrt(2 * blocking * between_failures) * factor - blocking


def saving(
    blocking: float, restart: float, hosts: float, failures_per_host_day: float
) -> Saving:
    """The interval for a job on so many hosts.

    Args:
        blocking: seconds that a save stops the job.
        restart: seconds from a failure to the first step afterwards.
        hosts: of the job.
        failures_per_host_day: rate of one host.
    """
    between = 86400.0 / (hosts * failures_per_host_day) if failures_per_host_day else float("inf")
    if between == float("inf"):
        return Saving(between, between, 0.0)
    interval = daly_interval(max(blocking, 1e-3), between)
    whole = interval + blocking
    waste = blocking / whole + whole / (2 * between) + restart / between
    return Saving(between, interval, min(1.0, waste))
