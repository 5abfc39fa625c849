"""Seconds of collectives, and how many copies of a token each dispatcher sends.

Knows: rings, all-to-all over one or two networks, duplicates. Does not know: models.

The number of distinct groups that the k experts of a token fall into, when E experts stand in n
groups and are drawn without replacement, is n (1 - C(E - E/n, k) / C(E, k)).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, lgamma, log2

from trimtab.config.cluster import Cluster, Collective, Network
from trimtab.plan.job import Dispatcher
from trimtab.plan.placement import Span, span_of


def distinct_groups(experts: int, chosen: int, groups: int) -> float:
    """Expected groups of experts that a token is sent to.

    >>> round(distinct_groups(896, 16, 8), 2), round(distinct_groups(256, 8, 32), 2)
    (7.07, 7.27)
    """
    rest = experts - experts / groups
    if rest < chosen:
        return float(groups)

    def log_choose(n: float, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    return groups * (1 - exp(log_choose(rest, chosen) - log_choose(experts, chosen)))


def _steps(network: Network, size: int) -> float:
    return network.latency.value * max(1, ceil(log2(max(2, size))))


def _rate(network: Network, kind: Collective, size: int) -> float:
    return network.bandwidth.value * network.reach(kind, size)


def ring_seconds(cluster: Cluster, span: Span, size: float, kind: Collective) -> float:
    """All-gather or reduce-scatter of `size` bytes in all; an all-reduce is twice that.

    Over several hosts every host's ranks share the traffic that enters it, and pass it on inside.

    Args:
        cluster: the machine.
        span: the group.
        size: bytes that each rank has at the end.
        kind: `all_gather` (and reduce-scatter) or `all_reduce`.
    """
    if span.size <= 1:
        return 0.0
    times = 2.0 if kind == "all_reduce" else 1.0
    seconds = cluster.collective_seconds.value
    inner = span.inner
    if inner is not None:
        share = (span.per_host - 1) / span.per_host
        seconds += times * share * size / _rate(inner, kind, span.per_host) + _steps(inner, span.per_host)
    if span.outer is not None:
        entering = size * (span.hosts - 1) / span.hosts / span.per_host
        seconds += times * entering / _rate(span.outer, kind, span.size) + _steps(span.outer, span.hosts)
    return seconds


def send_seconds(cluster: Cluster, size: float, stride: int) -> float:
    """One message to the rank `stride` further on."""
    span = span_of(cluster, 2, stride)
    network = span.outer or span.inner
    if network is None:
        return 0.0
    rate = network.pair_bandwidth.value * network.reach("send", 2)
    return network.latency.value + size / rate


@dataclass(frozen=True, slots=True)
class Exchange:
    """One dispatch or combine on the fullest rank.

    Args:
        seconds: of the collective.
        bytes: that the rank sends over any network.
    """

    seconds: float
    bytes: float


def exchange(
    cluster: Cluster, span: Span, dispatcher: Dispatcher, tokens: float, experts: int, chosen: int,
    row_bytes: float, load: float,
) -> Exchange:
    """One dispatch of tokens to experts, or the combination of their results.

    Args:
        cluster: the machine.
        span: the expert-parallel group.
        dispatcher: `flat` sends each routed copy, `dedup` one copy to each distinct host and
            rank, `all_gather` every token to every rank.
        tokens: of this rank.
        experts: E.
        chosen: A.
        row_bytes: of one token as it is sent.
        load: tokens of the fullest rank over the mean.
    """
    if span.size <= 1:
        return Exchange(0.0, 0.0)
    row = tokens * row_bytes
    if dispatcher == "all_gather":
        size = row * span.size
        return Exchange(ring_seconds(cluster, span, size, "all_gather"), row * (span.size - 1))
    e, hosts = span.size, span.hosts
    same_host = span.per_host / e
    if dispatcher == "flat":
        outer = row * chosen * (1 - same_host)
        inner = row * chosen * (same_host - 1 / e)
    else:
        # One copy over the outer network per distinct remote host, then one per distinct rank.
        ranks = distinct_groups(experts, chosen, e)
        groups = distinct_groups(experts, chosen, hosts) if hosts > 1 else 1.0
        one_level = span.outer is not None and span.outer.name == "pod"
        outer = row * (ranks if one_level else groups) * (1 - 1 / hosts)
        inner = row * ranks * (1 - 1 / e) * (same_host if one_level else 1.0)
    seconds = cluster.collective_seconds.value
    slow = 0.0
    if span.inner is not None:
        slow = load * inner / _rate(span.inner, "all_to_all", span.per_host)
        seconds += _steps(span.inner, 2)
    if span.outer is not None:
        slow = max(slow, load * outer / _rate(span.outer, "all_to_all", e))
        seconds += _steps(span.outer, 2)
    return Exchange(seconds + slow, outer + inner)
