"""What every benchmark shares: interleaved timing, peak memory, rows that say where they come from.

A benchmark checks correctness first, then times all sides in turns in one process and reports the
medians and their ratio. Memory is the peak resident set of a fresh process above what it held
when the work began.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall times of one side.

    Args:
        seconds: one entry per run, in order.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """One measured figure beside what is expected of it.

    Args:
        case: what was measured, with its sizes, such as "kda fwd+bwd B1 T4096 H8 K64 V64".
        quantity: such as "speed over transformers" or "extra memory (MiB)".
        value: measured.
        limit: bound the value is held to; None for a figure without one.
        at_least: the limit is a lower bound, else an upper one.
        details: further plain values for the row, such as medians of both sides.
    """

    case: str
    quantity: str
    value: float
    limit: float | None = None
    at_least: bool = True
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the value keeps its limit."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_row(self) -> dict[str, object]:
        """Plain values for a results file."""
        return {
            "case": self.case, "quantity": self.quantity, "value": float(f"{self.value:.4g}"),
            "limit": self.limit, "at_least": self.at_least, "passed": self.passed, **self.details,
        }

    def as_line(self) -> str:
        """One line for people."""
        bound = "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g}"
        mark = "" if self.limit is None else "ok" if self.passed else "MISSED"
        return f"{self.case:<52} {self.quantity:<40} {self.value:>10.4g}  {bound:<10} {mark}".rstrip()


def interleave(
    sides: Mapping[str, Callable[[], object]], runs: int, *, warmup: int = 1,
    once: frozenset[str] = frozenset(), clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the sides in turns.

    Args:
        sides: name -> what to time.
        runs: timed calls of each side.
        warmup: untimed calls of each side before.
        once: sides that are so slow that they run one single time, without warm-up.
        clock: seconds; `time.process_time`, with one thread, gives on a machine with other work what
            the wall clock gives on an idle one.
    """
    for name, side in sides.items():
        for _ in range(0 if name in once else warmup):
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(runs):
        for name, side in sides.items():
            if turn and name in once:
                continue
            begin = clock()
            side()
            times[name].append(clock() - begin)
    return {name: Timing(tuple(found)) for name, found in times.items()}


def peak_extra_bytes(work: Callable[..., object], *args: object, threads: int = 1) -> int:
    """Peak resident bytes of `prepared()` above the resident bytes before it, in a fresh process.

    See `peak_bytes`.
    """
    begin, peak = peak_bytes(work, *args, threads=threads)
    return peak - begin


def peak_bytes(work: Callable[..., object], *args: object, threads: int = 1) -> tuple[int, int]:
    """Resident bytes before `prepared()` and their peak during it, in a fresh process.

    Args:
        work: importable function; called with `args` it prepares and returns the callable to measure.
        args: plain values.
        threads: of torch in that process.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(send, work, args, threads))
    process.start()
    send.close()
    try:
        begin, peak = receive.recv()
        return int(begin), int(peak)
    except EOFError:
        raise SystemExit(f"{work.__name__}{args} died while its memory was measured") from None
    finally:
        process.join()


def _measure(send: Any, work: Callable[..., Callable[[], object]], args: tuple[object, ...], threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    prepared = work(*args)
    # Resets VmHWM to the present resident size.
    Path("/proc/self/clear_refs").write_text("5")
    begin = _status("VmRSS")
    prepared()
    send.send((begin, _status("VmHWM")))
    send.close()


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}")


def sgemm_rate(
    size: int = 1024, runs: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP/s of a float32 matrix product with the threads torch has now."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    timing = interleave({"mm": lambda: a @ b}, runs, warmup=2, clock=clock)
    return 2 * size**3 / timing["mm"].median


def append_rows(path: Path, benchmark: str, rows: list[dict[str, object]]) -> None:
    """Add result rows, each with date, commit, versions and machine."""
    stamp = provenance()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({"benchmark": benchmark, **row, **stamp}) + "\n")


def provenance() -> dict[str, object]:
    """Where and with what a row was measured."""
    import torch

    return {
        "date": datetime.date.today().isoformat(), "commit": _commit(), "machine": _machine(),
        "threads": torch.get_num_threads(), "python": platform.python_version(),
        "torch": torch.__version__, **_peers(),
    }


def _peers() -> dict[str, object]:
    from importlib import metadata

    found: dict[str, object] = {}
    for name in ("transformers", "peft"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )
    return done.stdout.strip() or None


def _machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
