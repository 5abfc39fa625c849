"""The cluster document: what a machine can do, each number with the grade of its source.

Knows: the presets that ship with the package, units. Does not know: models, plans, keys (see
`cluster_document`).

A number may stand alone (it then has the document's `grade`) or as `{value: 64, grade: measured}`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from trimtab.config.cluster_document import (
    GRADES,
    ClusterSection,
    Curve,
    Grade,
    NetworkSection,
    Shares,
    Value,
)
from trimtab.config.document import Document, document_of, read_document
from trimtab.config.load import validation_error
from trimtab.errors import ConfigError

Collective = Literal["all_reduce", "all_gather", "all_to_all", "send"]
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Graded:
    """A number and how well it is known."""

    value: float
    grade: Grade


@dataclass(frozen=True, slots=True)
class Reach:
    """Share of a network's bandwidth that a collective reaches in a group of so many ranks."""

    ranks: int
    share: float
    grade: Grade


@dataclass(frozen=True, slots=True)
class Network:
    """One layer of the interconnect.

    Args:
        name: `host`, `pod` (other hosts of one super-node or rack) or `fabric`.
        ranks: ranks that reach each other through it; 0 without a limit.
        bandwidth: bytes per second that one rank sends, and as much that it receives at once.
        pair_bandwidth: bytes per second between two ranks alone.
        latency: seconds of one message.
        efficiency: share of `bandwidth` that a collective reaches, by rising group size.
    """

    name: Literal["host", "pod", "fabric"]
    ranks: int
    bandwidth: Graded
    pair_bandwidth: Graded
    latency: Graded
    efficiency: tuple[tuple[str, tuple[Reach, ...]], ...]

    def _curve(self, kind: Collective) -> tuple[Reach, ...]:
        curves = dict(self.efficiency)
        return curves.get(kind) or curves.get("all") or (Reach(2, 1.0, "inferred"),)

    def reach(self, kind: Collective, group: int) -> float:
        """Share of the bandwidth in a group, on a straight line over log2 of its size."""
        curve = self._curve(kind)
        if group <= curve[0].ranks:
            return curve[0].share
        for low, high in pairwise(curve):
            if group <= high.ranks:
                part = math.log2(group / low.ranks) / math.log2(high.ranks / low.ranks)
                return low.share + part * (high.share - low.share)
        return curve[-1].share

    def reach_grade(self, kind: Collective, group: int) -> Grade:
        """Grade of that share: the worse of its neighbours on the curve, `inferred` beyond its end."""
        curve = self._curve(kind)
        if group <= curve[0].ranks:
            return curve[0].grade
        for low, high in pairwise(curve):
            if group <= high.ranks:
                return max(low.grade, high.grade, key=GRADES.index)
        return "inferred"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine that can be rented: one kind of device, hosts, networks.

    Rates are per rank and in SI units (bytes, seconds, FLOP); efficiencies are shares of a peak.

    Args:
        name: of the preset or file.
        title: in words.
        device: what one rank is.
        ranks_per_package: dies of one package, each of them a rank.
        packages_per_host: of one host.
        max_ranks: ranks there are, None without a limit.
        memory: device memory that a process sees, in bytes.
        context: device memory that driver and libraries take before any tensor, in bytes.
        bf16_flops, fp8_flops, fp4_flops: dense peaks; 0 where the device has none.
        memory_bandwidth: of device memory.
        gemm_efficiency: of large dense matrix products.
        grouped_efficiency: of grouped products over experts with many rows each.
        attention_efficiency: of softmax attention kernels.
        memory_efficiency: of element-wise kernels.
        kernel_seconds: fixed cost of one kernel; the rows that a grouped product needs per expert
            follow from it and from reading the weights.
        host_seconds: of one operator on the host, Python and autograd included; hidden while the
            device has work.
        collective_seconds: fixed cost of one collective.
        compute_overlap: share of communication that hides behind compute where the program can.
        networks: innermost first.
        host_memory: bytes per host.
        host_disk: bytes of local disk per host.
        host_link: bytes per second between host and device memory.
        storage_bandwidth: bytes per second that one host reads from storage.
        download_bandwidth: bytes per second of the whole cluster from outside.
        failures: per host and day.
        price: per rank and hour, in `currency`; None where none is given.
        currency: of the price.
        gemm_by_rows: measured share of the peak of dense products by their rows, empty if none.
        grouped_by_rows: the same of grouped products, by rows per expert.
    """

    name: str
    title: str
    device: str
    ranks_per_package: int
    packages_per_host: int
    max_ranks: int | None
    memory: Graded
    context: Graded
    bf16_flops: Graded
    fp8_flops: Graded
    fp4_flops: Graded
    memory_bandwidth: Graded
    gemm_efficiency: Graded
    grouped_efficiency: Graded
    attention_efficiency: Graded
    memory_efficiency: Graded
    kernel_seconds: Graded
    host_seconds: Graded
    collective_seconds: Graded
    compute_overlap: Graded
    networks: tuple[Network, ...]
    host_memory: Graded
    host_disk: Graded
    host_link: Graded
    storage_bandwidth: Graded
    download_bandwidth: Graded
    failures: Graded
    price: float | None = None
    currency: str = "USD"
    gemm_by_rows: Shares = ()
    grouped_by_rows: Shares = ()

    def measured_share(self, kind: Literal["gemm", "grouped"], rows: float) -> float | None:
        """Measured share of the peak of a product of so many rows, None where none was measured.

        A straight line over log2 of the rows, flat beyond the ends.
        """
        table = self.gemm_by_rows if kind == "gemm" else self.grouped_by_rows
        if not table or not rows:
            return None
        if rows <= table[0][0]:
            return table[0][1]
        for (low, at_low), (high, at_high) in pairwise(table):
            if rows <= high:
                return at_low + math.log2(rows / low) / math.log2(high / low) * (at_high - at_low)
        return table[-1][1]

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host."""
        return self.ranks_per_package * self.packages_per_host

    def grades(self) -> dict[str, Grade]:
        """Grade of every number, networks as `host.bandwidth` and so on."""
        found = {
            field.name: value.grade
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Graded)
        }
        for network in self.networks:
            for key in ("bandwidth", "pair_bandwidth", "latency"):
                found[f"{network.name}.{key}"] = getattr(network, key).grade
        return found


def cluster_names() -> tuple[str, ...]:
    """All presets, sorted.

    >>> "h200" in cluster_names()
    True
    """
    files = resources.files("trimtab.config").joinpath("clusters").iterdir()
    names = (file.name for file in files)
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_cluster(name: str) -> Cluster:
    """A preset by name, or the cluster document at a path.

    Raises:
        ConfigError: no such preset or file (TT107), or a fault of the document.

    >>> load_cluster("ascend-a3").ranks_per_host
    16
    """
    path = Path(name).expanduser()
    if path.is_file():
        return parse_cluster(read_document(path))
    if name in cluster_names():
        return _preset(name)
    near = _named_otherwise(name) or difflib.get_close_matches(name, cluster_names(), n=1, cutoff=0.4)
    hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}? " if near else ""
    raise ConfigError(
        "TT107", "--cluster", "no such file or preset", value=name,
        hint=f"{hint}presets: {', '.join(cluster_names())}",
    )


def _preset(name: str) -> Cluster:
    resource = resources.files("trimtab.config").joinpath("clusters", f"{name}.yaml")
    return parse_cluster(document_of(resource.read_text(encoding="utf-8"), f"cluster {name}"))


def _named_otherwise(name: str) -> list[str]:
    """Presets whose title or device has the word, such as `910c` or `CloudMatrix384`."""
    word = _letters(name)
    known = [_preset(preset) for preset in cluster_names()]
    return [c.name for c in known if len(word) > 2 and word in _letters(c.title + c.device)]


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def parse_cluster(document: Document) -> Cluster:
    """Check a cluster document and freeze it.

    Raises:
        ConfigError: one fault; `ErrorList` when there are several.
    """
    try:
        section = ClusterSection.model_validate(document.values)
    except ValidationError as error:
        hint = "a cluster needs name, title, device, packages_per_host, memory_gib, bf16_tflops "
        raise validation_error(error, document, ClusterSection, f"{hint}and memory_gb_s") from None
    return _frozen(section)


def _frozen(doc: ClusterSection) -> Cluster:
    def graded(value: Value, factor: float = 1.0) -> Graded:
        return Graded(value.value * factor, value.grade or doc.grade)

    def curve(net: NetworkSection, points: Curve) -> tuple[Reach, ...]:
        common = net.efficiency_grade or doc.grade
        return tuple(Reach(size, share, grade or common) for size, share, grade in points)

    def network(name: Literal["host", "pod", "fabric"], net: NetworkSection, ranks: int) -> Network:
        return Network(
            name, ranks, graded(net.bandwidth_gb_s, 1e9),
            graded(net.pair_gb_s or net.bandwidth_gb_s, 1e9),
            graded(net.latency_us, 1e-6),
            tuple((kind, curve(net, points)) for kind, points in net.efficiency.items()),
        )

    nets, host = doc.networks, doc.ranks_per_package * doc.packages_per_host
    layers = []
    if nets.host is not None:
        layers.append(network("host", nets.host, host))
    if nets.pod is not None:
        layers.append(network("pod", nets.pod, nets.pod.ranks or 0))
    if nets.fabric is not None:
        layers.append(network("fabric", nets.fabric, nets.fabric.ranks or 0))
    return Cluster(
        name=doc.name, title=doc.title, device=doc.device,
        ranks_per_package=doc.ranks_per_package, packages_per_host=doc.packages_per_host,
        max_ranks=doc.max_ranks,
        memory=graded(doc.memory_gib, _GIB), context=graded(doc.context_gib, _GIB),
        bf16_flops=graded(doc.bf16_tflops, 1e12), fp8_flops=graded(doc.fp8_tflops, 1e12),
        fp4_flops=graded(doc.fp4_tflops, 1e12),
        memory_bandwidth=graded(doc.memory_gb_s, 1e9),
        gemm_efficiency=graded(doc.gemm_efficiency),
        grouped_efficiency=graded(doc.grouped_efficiency),
        attention_efficiency=graded(doc.attention_efficiency),
        memory_efficiency=graded(doc.memory_efficiency),
        kernel_seconds=graded(doc.kernel_us, 1e-6), host_seconds=graded(doc.host_us, 1e-6),
        collective_seconds=graded(doc.collective_us, 1e-6),
        compute_overlap=graded(doc.compute_overlap),
        networks=tuple(layers),
        host_memory=graded(doc.host_memory_gib, _GIB), host_disk=graded(doc.host_disk_tb, 1e12),
        host_link=graded(doc.host_link_gb_s, 1e9),
        storage_bandwidth=graded(doc.storage_gb_s, 1e9),
        download_bandwidth=graded(doc.download_gb_s, 1e9),
        failures=graded(doc.failures_per_1000_host_days, 1e-3),
        price=doc.price_per_rank_hour, currency=doc.currency,
        gemm_by_rows=doc.gemm_by_rows, grouped_by_rows=doc.grouped_by_rows,
    )
