"""Conversion of a K3-shaped checkpoint: memory, rate beside the raw disk, time beside load and stack.

    python -m benchmarks.convert SCRATCH --prepare      (writes the checkpoints, 23 GB)
    python -m benchmarks.convert SCRATCH                (measures, removes them)

Correctness first: the smallest result is audited. Both sides begin with a source that is not in the
page cache and end when their files are on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import MIB, Result, append_rows
from benchmarks.k3_layer import write_checkpoint
from trimtab.checkpoint.direct import BlockFile, aligned_buffer
from trimtab.checkpoint.source import open_source
from trimtab.units import format_bytes

EXPERT_GROUPS = 8
# Name -> experts, words. Load/stack/save would need 20 GB of memory for the largest.
SETS = {"1 GB": (16, 512), "4 GB": (160, 8192), "17 GB": (896, 8192)}
STACKED = ("1 GB", "4 GB")
RUNS = {"1 GB": 3, "4 GB": 3, "17 GB": 2}
BLOCK = 8 * MIB
READERS = 4
RESULTS = Path(__file__).parent / "results" / "convert_cpu_202612.jsonl"

STACK = """
import json, os, re, sys, torch
from collections import defaultdict
from pathlib import Path
from safetensors.torch import load_file, save_file
src, dst, groups = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
dst.mkdir()
held = {}
for file in sorted(src.glob("*.safetensors")):
    held |= load_file(file)
stacks, rest = defaultdict(dict), {}
for name in list(held):
    found = re.fullmatch(r"(.*)experts\\.(\\d+)\\.(.*)", name)
    if found:
        stacks[found[1] + "experts." + found[3]][int(found[2])] = held.pop(name)
    else:
        rest[name] = held.pop(name)
for group in range(groups):
    out = {}
    for name, experts in stacks.items():
        each = len(experts) // groups
        out[name] = torch.stack([experts[e] for e in range(group * each, (group + 1) * each)])
    save_file(out, dst / f"experts-{group}.safetensors")
save_file(rest, dst / "rest.safetensors")
for file in dst.iterdir():
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One process.

    Args:
        seconds: wall time of the whole process.
        cpu_seconds: of user and system.
        peak: most resident bytes (VmHWM).
        output: what it printed.
    """

    seconds: float
    cpu_seconds: float
    peak: int
    output: str


def run(command: list[str]) -> Run:
    """Run a command to its end."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:4]} failed: {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(time.perf_counter() - begun, cpu, usage.ru_maxrss * 1024, output)


def forget(root: Path) -> None:
    """Take the files of a directory out of the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def raw_write_rate(scratch: Path, num_bytes: int) -> float:
    """Bytes per second of writing blocks past the page cache until they are on the disk.

    As many bytes and as large blocks as the conversion writes, because a disk may take a burst
    faster than a stream.
    """
    block = aligned_buffer(BLOCK)
    block[:] = os.urandom(len(block))
    path, size = scratch / "raw", num_bytes // BLOCK * BLOCK
    file = BlockFile(path)
    begun = time.perf_counter()
    for offset in range(0, size, BLOCK):
        file.write(offset, block)
    file.finish(size)
    seconds = time.perf_counter() - begun
    path.unlink()
    return size / seconds


def raw_copy_rate(scratch: Path, src: Path, num_bytes: int) -> float:
    """Bytes per second of copying the source past the page cache with nothing done to it.

    A conversion reads as much as it writes, so that this is what the disk leaves it where reads and
    writes share one bandwidth.
    """
    forget(src)
    handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in sorted(src.glob("*.safetensors"))]
    jobs = [
        (handle, offset) for handle in handles
        for offset in range(0, os.fstat(handle).st_size - BLOCK + 1, BLOCK)
    ][: num_bytes // BLOCK]
    blocks = [aligned_buffer(BLOCK) for _ in range(READERS + 1)]
    path, written = scratch / "raw", 0
    file = BlockFile(path)
    reading = deque[tuple[memoryview, Future[int]]]()
    begun = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        for number in range(len(jobs) + READERS):
            if number < len(jobs):
                block = blocks[number % len(blocks)]
                reading.append((block, readers.submit(os.preadv, jobs[number][0], [block],
                                                      jobs[number][1])))
            if number >= READERS:
                block, read = reading.popleft()
                read.result()
                file.write(written, block)
                written += BLOCK
    file.finish(written)
    seconds = time.perf_counter() - begun
    for handle in handles:
        os.close(handle)
    path.unlink()
    return written / seconds


def convert(src: Path, dst: Path, *flags: str) -> Run:
    """Convert for eight expert groups in a fresh process; the result is removed by the caller."""
    forget(src)
    command = [sys.executable, "-m", "trimtab", "convert", str(src), "--out", str(dst)]
    return run([*command, "--ep", str(EXPERT_GROUPS), "--json", *flags])


def stack(src: Path, dst: Path) -> Run:
    """The usual way: load everything, stack, save."""
    forget(src)
    return run([sys.executable, "-c", STACK, str(src), str(dst), str(EXPERT_GROUPS)])


def check(scratch: Path) -> None:
    """The smallest set is converted as it must be."""
    convert(scratch / "1 GB", scratch / "out", "--audit")
    shutil.rmtree(scratch / "out")


def measure(scratch: Path, name: str) -> list[Result]:
    """All figures of one set; what is compared runs in turn, since disks are not steady."""
    src, out = scratch / name, scratch / "out"
    size = sum(entry.num_bytes for entry in open_source(src).entries().values())
    runs: list[Run] = []
    raw, copies, rates, stacked = [], [], [], []
    for _ in range(RUNS[name]):
        raw.append(raw_write_rate(scratch, size))
        runs.append(convert(src, out))
        rates.append(json.loads(runs[-1].output)["bytes_per_second"])
        shutil.rmtree(out)
        copies.append(raw_copy_rate(scratch, src, size))
        if name in STACKED:
            stacked.append(stack(src, out))
            shutil.rmtree(out)
    case = f"convert K3 layer, {size / 1e9:.1f} GB, ep {EXPERT_GROUPS}"
    details: dict[str, object] = {
        "bytes": size, "wall_seconds": [round(done.seconds, 2) for done in runs],
        "raw_write_bytes_per_second": [round(rate) for rate in raw],
        "raw_copy_bytes_per_second": [round(rate) for rate in copies],
        "convert_bytes_per_second": [round(rate) for rate in rates],
        "cpu_seconds": [round(done.cpu_seconds, 2) for done in runs],
    }
    found = [
        Result(case, "peak memory (MiB)", max(done.peak for done in runs) / MIB, 256, False, details),
        Result(case, "output rate over raw write rate", _ratio(rates, raw), 0.6, True, details),
        Result(case, "raw copy rate over raw write rate", _ratio(copies, raw), None, True, details),
        Result(case, "output rate over raw copy rate", _ratio(rates, copies), 0.8, True, details),
    ]
    if stacked:
        more = {"stack_cpu_seconds": [round(r.cpu_seconds, 2) for r in stacked],
                "stack_seconds": [round(r.seconds, 2) for r in stacked],
                "stack_peak_mib": round(max(r.peak for r in stacked) / MIB)}
        faster = _ratio([r.seconds for r in stacked], [r.seconds for r in runs])
        found.append(Result(case, "speed over load/stack/save", faster, 2.5, True, details | more))
    return found


def measure_other(scratch: Path, other: Path) -> list[Result]:
    """The output rate when the source is not on the disk that is written to."""
    src, out = other / "model", scratch / "out"
    size = write_checkpoint(src, *SETS["4 GB"])
    raw, rates = [], []
    for _ in range(RUNS["4 GB"]):
        raw.append(raw_write_rate(scratch, size))
        rates.append(json.loads(convert(src, out).output)["bytes_per_second"])
        shutil.rmtree(out)
    shutil.rmtree(src)
    case = f"convert K3 layer, {size / 1e9:.1f} GB, ep {EXPERT_GROUPS}, source elsewhere"
    details = {"raw_write_bytes_per_second": [round(rate) for rate in raw],
               "convert_bytes_per_second": [round(rate) for rate in rates]}
    return [Result(case, "output rate over raw write rate", _ratio(rates, raw), 0.6, True, details)]


def _ratio(values: list[float], beside: list[float]) -> float:
    """Median of the ratios of what ran in turn."""
    return _median([value / other for value, other in zip(values, beside, strict=True)])


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path, help="directory on the disk to measure")
    parser.add_argument("--prepare", action="store_true", help="write the checkpoints and stop")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--other", type=Path, help="directory on another disk or in memory, 4.3 GB")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    parser.add_argument("--dry", action="store_true", help="write no rows")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    if options.prepare:
        for name in options.sets:
            size = write_checkpoint(options.scratch / name, *SETS[name])
            print(f"{name}: {format_bytes(size)}")
        return
    check(options.scratch)
    results = [result for name in options.sets for result in measure(options.scratch, name)]
    if options.other is not None:
        results += measure_other(options.scratch, options.other)
    peaks = [r.value for r in results if r.quantity.startswith("peak")]
    spread = max(peaks) / min(peaks)
    results.append(Result("all sizes", "largest over smallest peak memory", spread, 1.1, False))
    for result in results:
        print(result.as_line())
    if not options.dry:
        append_rows(RESULTS, "convert", [result.as_row() for result in results])
    if not options.keep:
        shutil.rmtree(options.scratch)


if __name__ == "__main__":
    main()
