"""A cluster document of this machine, from measurements.

Knows: which key a measurement belongs to. Does not know: how it is measured.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence

import torch
import yaml

from trimtab.config.cluster import parse_cluster
from trimtab.config.cluster_document import Shares
from trimtab.config.document import document_of
from trimtab.errors import ConfigError
from trimtab.parallel.collectives import CollectiveSpeed, measure_collectives
from trimtab.parallel.measure import DeviceSpeed, measure_device, this_device

_GIB = 2**30


def calibrate(ranks: int | None, say: Callable[[str], object], size: int | None = None) -> str:
    """Measure this machine.

    Args:
        ranks: of this host; by default its accelerators, or one on a CPU.
        say: told what is being measured.
        size: rows of the matrices, for a test.

    Returns:
        A cluster document in YAML, with the grade `measured` at what was.

    Raises:
        ConfigError: TT105, more ranks than accelerators.
        RunError: TT606, a rank failed.
    """
    is_cpu = this_device().type == "cpu"
    there = 1 if is_cpu else torch.accelerator.device_count()
    count = ranks or there
    if count > there and not is_cpu:
        raise ConfigError("TT105", "--devices", f"this machine has {there} accelerators", value=count)
    say(f"matrix products, attention and memory of one of {count}")
    speed = measure_device(size)
    found: list[CollectiveSpeed] = []
    if count > 1:
        say(f"collectives among {count} ranks")
        found = measure_collectives(count, 2**24 if size is None else 2**16)
    text = yaml.safe_dump(document(speed, count, found), sort_keys=False, allow_unicode=True)
    # What is written can be read.
    parse_cluster(document_of(text, "calibration"))
    return str(text)


def document(speed: DeviceSpeed, ranks: int, found: Sequence[CollectiveSpeed]) -> dict[str, object]:
    """The values of a cluster document.

    Args:
        speed: of one device.
        ranks: of the host.
        found: collectives of the host.
    """
    is_cpu = speed.host_link is None
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Ranks on a CPU share its cores and its memory.
    share = ranks if is_cpu else 1
    values: dict[str, object] = {
        "name": socket.gethostname() or "here", "title": f"this machine: {ranks} x {speed.name}",
        "device": speed.name, "grade": "measured",
        "sources": [f"trimtab plan --calibrate, products in {speed.dtype}"],
        "packages_per_host": ranks, "max_ranks": ranks,
        "memory_gib": _digits(speed.memory / share / _GIB),
        "bf16_tflops": _digits(speed.flops / share / 1e12),
        "memory_gb_s": _digits(speed.memory_bandwidth / share / 1e9),
        "gemm_by_rows": _pairs(speed.gemm), "grouped_by_rows": _pairs(speed.grouped),
        "attention_efficiency": _digits(speed.attention),
        "memory_efficiency": _digits(speed.elementwise),
        "kernel_us": _digits(speed.kernel_seconds * 1e6),
        "host_us": _digits(speed.host_seconds * 1e6),
        "host_memory_gib": _digits(host_memory / _GIB),
        "host_disk_tb": _digits(shutil.disk_usage(".").total / 1e12),
    }
    if is_cpu:
        values |= {"context_gib": {"value": 0.5, "grade": "inferred"},
                   "compute_overlap": {"value": 0.0, "grade": "inferred"}}
    else:
        values["host_link_gb_s"] = _digits((speed.host_link or 0.0) / 1e9)
    if found:
        # The latency of a small message holds the fixed cost of a collective.
        values["collective_us"] = 0.0
        values["networks"] = {"host": _network(found)}
    return values


def _network(found: Sequence[CollectiveSpeed]) -> dict[str, object]:
    """The fastest collective is the bandwidth, and each kind's share of it its efficiency."""
    most = max(row.bandwidth for row in found)
    curves: dict[str, list[list[float]]] = {}
    for row in sorted(found, key=lambda row: row.ranks):
        curves.setdefault(row.kind, []).append([row.ranks, _digits(row.bandwidth / most)])
    return {"bandwidth_gb_s": _digits(most / 1e9),
            "latency_us": _digits(min(row.latency for row in found) * 1e6), "efficiency": curves}


def _pairs(table: Shares) -> list[list[float]]:
    return [[rows, _digits(share)] for rows, share in table]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
