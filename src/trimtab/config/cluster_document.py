"""Keys of a cluster document, their units, defaults and ranges.

Knows: which keys there are. Does not know: files, presets, what the numbers are used for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from trimtab.config.fields import Positive, PositiveInt, Section, Word, fault, no_bool

Grade = Literal["measured", "documented", "vendor_claim", "inferred"]
GRADES: tuple[Grade, ...] = ("measured", "documented", "vendor_claim", "inferred")
"""From the best to the worst source of a number."""

Shares = tuple[tuple[int, float], ...]
"""Shares of a peak by a rising count."""


class GradedSection(Section):
    """A number with the grade of its source.

    Attributes:
        value: the number, in the unit that the key's name ends with.
        grade: how it is known; the document's where left out.
    """

    value: Annotated[float, BeforeValidator(no_bool), Field(ge=0, allow_inf_nan=False)]
    grade: Grade | None = None


def _alone(value: object) -> object:
    return value if isinstance(value, dict | GradedSection) else {"value": value}


def _default(value: float) -> GradedSection:
    return GradedSection(value=value, grade="inferred")


Value = Annotated[GradedSection, BeforeValidator(_alone)]


def _with_grade(value: object) -> object:
    return [*value, None] if isinstance(value, list | tuple) and len(value) == 2 else value


Point = Annotated[
    tuple[PositiveInt, Annotated[float, Field(gt=0, le=1.5)], Grade | None],
    BeforeValidator(_with_grade),
]
Curve = tuple[Point, ...]


def _rising(table: Shares) -> Shares:
    rows = [row for row, _ in table]
    if sorted(set(rows)) != rows:
        raise fault("TT102", "", "needs pairs of rising rows and a share")
    return table


Table = Annotated[
    tuple[tuple[PositiveInt, Annotated[float, Field(gt=0, le=1)]], ...], AfterValidator(_rising)
]


class NetworkSection(Section):
    """One layer of the interconnect.

    Attributes:
        ranks: ranks that it connects; left out on the outermost layer.
        bandwidth_gb_s: of one rank, one direction.
        pair_gb_s: between two ranks alone; the whole bandwidth where left out.
        latency_us: of one message.
        efficiency: collective (or `all`) to pairs of group size and share of the bandwidth; a third
            value is the grade of that point alone.
        efficiency_grade: how the shares are known; the document's grade where left out.
    """

    ranks: PositiveInt | None = None
    bandwidth_gb_s: Value
    pair_gb_s: Value | None = None
    latency_us: Value
    efficiency: dict[Literal["all", "all_reduce", "all_gather", "all_to_all", "send"], Curve] = Field(
        default_factory=dict
    )
    efficiency_grade: Grade | None = None

    @field_validator("efficiency")
    @classmethod
    def _rises(cls, value: dict[str, Curve]) -> dict[str, Curve]:
        for name, curve in value.items():
            sizes = [size for size, _, _ in curve]
            if not sizes or sizes[0] < 2 or sorted(set(sizes)) != sizes:
                rule = "needs pairs of a rising group size of 2 or more and a share"
                raise fault("TT102", name, rule)
        return value


class NetworksSection(Section):
    """The layers that exist; `host` and `fabric` of a single host may be left out.

    Attributes:
        host: inside a host.
        pod: to other hosts of one super-node or rack.
        fabric: between those.
    """

    host: NetworkSection | None = None
    pod: NetworkSection | None = None
    fabric: NetworkSection | None = None


class ClusterSection(Section):
    """A whole cluster document; every key's unit is the end of its name.

    Attributes:
        name: short name.
        title: in words.
        device: what one rank is.
        grade: of every number without one of its own.
        sources: where the numbers are from, in words.
        ranks_per_package: dies of one package, each of them a rank.
        packages_per_host: packages of one host.
        max_ranks: ranks that there are.
        memory_gib: device memory that a process sees.
        context_gib: taken by driver and libraries.
        bf16_tflops: dense peak.
        fp8_tflops: dense peak; left out where there is none.
        fp4_tflops: dense peak; left out where there is none.
        memory_gb_s: bandwidth of device memory.
        gemm_efficiency: share of the peak of large products.
        grouped_efficiency: share of the peak of grouped products.
        attention_efficiency: share of the peak of attention.
        memory_efficiency: share of the memory bandwidth of element-wise kernels.
        kernel_us: fixed cost of a kernel.
        host_us: cost of an operator on the host.
        collective_us: fixed cost of a collective.
        compute_overlap: share of communication that can hide behind compute.
        networks: the interconnect.
        host_memory_gib: of one host.
        host_disk_tb: of one host.
        host_link_gb_s: between host and device memory.
        storage_gb_s: that one host reads from storage.
        download_gb_s: of the cluster, from outside.
        failures_per_1000_host_days: of one host.
        price_per_rank_hour: for the cost of a job.
        currency: of the price.
        gemm_by_rows: pairs of rows and measured share of the peak of a dense product; in place of
            gemm_efficiency.
        grouped_by_rows: pairs of rows per expert and measured share of the peak of a grouped
            product; in place of grouped_efficiency.
    """

    name: Word
    title: Word
    device: Word
    grade: Grade = "inferred"
    sources: tuple[Word, ...] = ()
    ranks_per_package: PositiveInt = 1
    packages_per_host: PositiveInt
    max_ranks: PositiveInt | None = None
    memory_gib: Value
    context_gib: Value = _default(1.0)
    bf16_tflops: Value
    fp8_tflops: Value = _default(0.0)
    fp4_tflops: Value = _default(0.0)
    memory_gb_s: Value
    gemm_efficiency: Value = _default(0.7)
    grouped_efficiency: Value = _default(0.5)
    attention_efficiency: Value = _default(0.5)
    memory_efficiency: Value = _default(0.7)
    kernel_us: Value = _default(5.0)
    host_us: Value = _default(20.0)
    collective_us: Value = _default(10.0)
    compute_overlap: Value = _default(0.8)
    networks: NetworksSection = NetworksSection()
    host_memory_gib: Value = _default(1024.0)
    host_disk_tb: Value = _default(4.0)
    host_link_gb_s: Value = _default(25.0)
    storage_gb_s: Value = _default(2.0)
    download_gb_s: Value = _default(1.0)
    failures_per_1000_host_days: Value = _default(6.5)
    price_per_rank_hour: Positive | None = None
    currency: Word = "USD"
    gemm_by_rows: Table = ()
    grouped_by_rows: Table = ()

    @model_validator(mode="after")
    def _nested(self) -> ClusterSection:
        """Layers of the interconnect grow from the inside out."""
        nets = self.networks
        host = self.ranks_per_package * self.packages_per_host
        if nets.host is not None and nets.host.ranks not in (None, host):
            raise fault("TT105", "networks.host.ranks", f"must be the {host} ranks of a host")
        if nets.pod is not None and (nets.pod.ranks is None or nets.pod.ranks % host):
            raise fault("TT105", "networks.pod.ranks", f"must be a multiple of a host's {host} ranks")
        for name in ("gemm", "grouped", "attention", "memory"):
            if not 0 < getattr(self, f"{name}_efficiency").value <= 1:
                raise fault("TT102", f"{name}_efficiency", "must be above 0 and at most 1")
        for name in ("memory_gib", "bf16_tflops", "memory_gb_s", "storage_gb_s"):
            if not getattr(self, name).value > 0:
                raise fault("TT102", name, "must be above 0")
        return self
