"""Degrees of parallelism and where the ranks of a group sit.

Knows: which ranks form a group, how they fall into packages, hosts and super-nodes, and which
network a group spans. Does not know: models, time.

world = pp * dp_replicate * dp_shard * cp * tp; ep divides dp_shard * cp * tp. Ranks are numbered
with tp fastest, then cp, dp_shard, dp_replicate, pp, so that the most talkative groups stay inside
a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trimtab.config.cluster import Cluster, Network
from trimtab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Degrees:
    """How the job is divided; `etp` ranks divide each expert by channels."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Ranks that see different tokens of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def expert_shard(self) -> int:
        """Ranks over which one expert's parameters are sharded beside `ep` and `etp`."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def check(self) -> None:
        """Raise if the degrees do not fit together.

        Raises:
            ConfigError: ep does not divide dp_shard * cp * tp (TT105).
        """
        inner = self.dp_shard * self.cp * self.tp
        if inner % (self.ep * self.etp):
            raise ConfigError(
                "TT105", "parallel.ep", f"must divide dp_shard * cp * tp ({inner})", value=self.ep,
                hint="experts are divided among the ranks that hold the same layers",
            )


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ranks on the interconnect.

    Args:
        size: ranks of the group.
        per_host: ranks of it in one host.
        hosts: hosts it spans.
        inner: the network inside a host, None for one rank per host.
        outer: the outermost network it crosses, None inside one host.
    """

    size: int
    per_host: int
    hosts: int
    inner: Network | None
    outer: Network | None


def span_of(cluster: Cluster, size: int, stride: int) -> Span:
    """Where a group of `size` ranks that stand `stride` apart sits.

    Args:
        cluster: the machine.
        size: ranks of the group.
        stride: distance of two neighbours in rank numbers.
    """
    host = cluster.ranks_per_host
    per_host = max(1, min(size, host // stride)) if stride < host else 1
    hosts = ceil(size / per_host)
    networks = {network.name: network for network in cluster.networks}
    outer: Network | None = None
    if hosts > 1:
        pod, reach = networks.get("pod"), size * stride
        outer = pod if pod is not None and reach <= pod.ranks else networks.get("fabric", pod)
    return Span(size, per_host, hosts, networks.get("host") if per_host > 1 else None, outer)


def expert_span(cluster: Cluster, degrees: Degrees) -> Span:
    """The group among which experts are divided: neighbouring ranks of one stage."""
    return span_of(cluster, degrees.ep, 1)


def describe_ranks(cluster: Cluster, ranks: int) -> str:
    """How many packages and hosts so many ranks are, and what memory each has.

    >>> from trimtab.config.cluster import load_cluster
    >>> describe_ranks(load_cluster("ascend-a3"), 64)
    '64 ranks = 32 packages = 4 hosts, 64 GiB each'
    """
    packages = ceil(ranks / cluster.ranks_per_package)
    hosts = ceil(ranks / cluster.ranks_per_host)
    memory = f"{cluster.memory.value / 2**30:.4g} GiB each"

    def count(number: int, word: str) -> str:
        return f"{number} {word}" if number == 1 else f"{number} {word}s"

    if cluster.ranks_per_package == 1:
        return f"{count(ranks, 'rank')} = {count(hosts, 'host')}, {memory}"
    return f"{count(ranks, 'rank')} = {count(packages, 'package')} = {count(hosts, 'host')}, {memory}"


def require_ranks(cluster: Cluster, ranks: int, where: str) -> None:
    """Raise if the cluster has fewer ranks.

    Raises:
        ConfigError: more ranks than there are (TT105).
    """
    most = cluster.max_ranks
    if most is None and not any(net.name == "fabric" for net in cluster.networks):
        most = max([cluster.ranks_per_host, *(net.ranks for net in cluster.networks)])
    if most is not None and ranks > most:
        raise ConfigError(
            "TT105", where, f"{cluster.name} has {most} rank{'s' * (most != 1)}", value=ranks,
            hint="ask for fewer, or write a cluster document with a larger network",
        )
