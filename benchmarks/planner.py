"""Predictions of the planner against published runs: `python -m benchmarks.planner FILE.csv`.

Prints, per block of rows, n, median, 90th percentile and largest absolute error, and the signed
mean. Times are shown zero-shot and with one factor per hardware and program, which is the mean of
at most two rows that are not held out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from pathlib import Path

from benchmarks.planner_rows import (
    MODELS,
    Case,
    cases,
    outline_for,
    precision_for,
    test_groups_hash,
)
from benchmarks.planner_table import degree, faults, number, read_rows, unknown_columns
from trimtab.arch.spec import DenseSpec
from trimtab.plan.search import MEMORY_SHARE

FROZEN = Path(__file__).with_name("planner_test_groups.txt")
_PER_FACTOR = 2


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="table of published runs")
    parser.add_argument("--rows", metavar="BLOCK", help="every row of one block, too")
    parser.add_argument("--skipped", action="store_true", help="why rows were left out")
    arguments = parser.parse_args()
    rows = read_rows(arguments.file)
    wrong = [f"row {row['id'] or '?'}, {fault}" for row in rows for fault in faults(row)]
    for line in (*wrong, *(f"column {name} is not used" for name in unknown_columns(rows))):
        print(line)
    skipped: dict[str, str] = {}
    found = list(cases(rows, skipped))
    print(f"{len(rows)} rows, {len(found)} predicted, {len(skipped)} left out: "
          + ", ".join(f"{n} {why}" for why, n in Counter(skipped.values()).most_common()))
    print(split_line(rows))
    memory_tables(found)
    time_tables(found)
    fit_table(found)
    ordering(found)
    if arguments.rows:
        every_row(found, arguments.rows)
    if arguments.skipped:
        for row, why in skipped.items():
            print(row, why)
    return 1 if wrong else 0


def split_line(rows: list[dict[str, str]]) -> str:
    """Whether the held-out groups are those that the repository has frozen."""
    count, digest = test_groups_hash(rows)
    frozen = FROZEN.read_text(encoding="utf-8").split()
    known = frozen == [str(count), digest]
    return f"held-out groups: {count}, sha256 {digest[:16]}, " + (
        "as frozen" if known else "another table than the frozen one"
    )


def memory_error(case: Case) -> float | None:
    """Relative error of the peak, of the counter that was read."""
    if case.memory is None or not case.measured_memory:
        return None
    found = case.memory.reserved if case.is_reserved else case.memory.allocated
    return found / case.measured_memory - 1


def time_error(case: Case, factor: float = 1.0) -> float | None:
    """Relative error of the step."""
    if not case.seconds or not case.measured_seconds:
        return None
    return case.seconds * factor / case.measured_seconds - 1


def program_of(row: Mapping[str, str]) -> str:
    """Program without its version."""
    return re.split(r" \d| main| PR| CI", row["framework"])[0]


def factors(found: Iterable[Case]) -> dict[tuple[str, str, str], float]:
    """Measured over predicted, per hardware, program and precision, from at most two rows.

    The newest rows come first, each of another group: a factor is for the stack of today.
    """
    logs: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for case in sorted(found, key=lambda c: c.row["framework"], reverse=True):
        error = time_error(case)
        key = factor_key(case.row)
        if case.is_test or error is None or len(logs[key]) >= _PER_FACTOR:
            continue
        logs[key].setdefault(case.row["group"], -math.log1p(error))
    return {key: math.exp(statistics.mean(v.values())) for key, v in logs.items() if v}


def factor_key(row: Mapping[str, str]) -> tuple[str, str, str]:
    """What one factor is for."""
    return row["hardware"], program_of(row), precision_for(row["precision"])


def memory_tables(found: list[Case]) -> None:
    """Peaks per block, with competitors on the same rows."""
    print("\npeak memory, error per distinct layout (held-out layouts in the second line)")
    table(found, memory_error, distinct=True)
    simumax = [c for c in distinct_memory(found) if "SimuMax" in c.block]
    if not simumax:
        return
    print("\nthe same rows by others")
    show("  SimuMax, as it printed", [e for c in simumax if (e := printed(c, "GiB")) is not None])
    show("  Megatron-LM's formula", [megatron_error(c) for c in simumax if degree(c.row, "cp") == 1])
    show("  Trimtab", [e for c in simumax if (e := memory_error(c)) is not None])


def time_tables(found: list[Case]) -> None:
    """Step times per block, zero-shot and calibrated."""
    print("\nstep time, zero-shot")
    table(found, time_error)
    known = factors(found)
    print(f"\nstep time with one factor per hardware, program and precision ({len(known)} factors, "
          f"at most {_PER_FACTOR} groups each; held-out rows only)")

    def calibrated(case: Case) -> float | None:
        factor = known.get(factor_key(case.row))
        return time_error(case, factor) if factor is not None and case.is_test else None

    table(found, calibrated, split=False)
    multi = [c for c in found if degree(c.row, "ep") > 1 and (number(c.row, "n_dev") or 0) > 8]
    print("\nexpert parallelism on more than 8 devices")
    show("  zero-shot", _errors(multi, time_error))
    show("    newest of each layout", _errors(newest(multi), time_error))
    tables = [c for c in multi if c.block == "Bridge tables"]
    show("    of release tables", _errors(newest(tables), time_error))
    show("  calibrated", _errors(multi, calibrated))
    simumax = [c for c in found if "SimuMax" in c.block]
    if simumax:
        print("\nthe same rows by others")
        show("  SimuMax, as it printed", [e for c in simumax if (e := printed(c, "ms")) is not None])
        show("  Trimtab, zero-shot", _errors(simumax, time_error))


def newest(found: Iterable[Case]) -> list[Case]:
    """One case per group, that of the newest program: older readings are the drift of the stack."""
    last: dict[str, Case] = {}
    for case in sorted(found, key=lambda c: c.row["framework"]):
        if case.measured_seconds:
            last[case.row["group"]] = case
    return list(last.values())


def _errors(found: Iterable[Case], error: Callable[[Case], float | None]) -> list[float]:
    return [e for case in found if (e := error(case)) is not None]


def table(
    found: list[Case], error: Callable[[Case], float | None], *, distinct: bool = False,
    split: bool = True,
) -> None:
    """One line per block, and one of its held-out rows."""
    chosen = distinct_memory(found) if distinct else found
    for block in sorted({case.block for case in chosen}):
        mine = [case for case in chosen if case.block == block]
        errors = _errors(mine, error)
        if not errors:
            continue
        show(f"  {block}", errors)
        held = _errors([case for case in mine if case.is_test], error)
        if split and 0 < len(held) < len(errors):
            show("    held out", held)


def distinct_memory(found: Iterable[Case]) -> list[Case]:
    """One case per layout: some sources repeat one reading for several batch sizes."""
    seen: dict[object, Case] = {}
    for case in found:
        row = case.row
        key = tuple(row[k] for k in ("model", "layers", "hardware", "tp", "pp", "vpp", "ep", "cp", "mbs",
                                     "seq", "mem_alloc", "mem_reserved", "recompute"))
        seen.setdefault(key, case)
    return list(seen.values())


def show(name: str, errors: list[float]) -> None:
    """One line of numbers."""
    if not errors:
        print(f"{name:<26} no rows")
        return
    sizes = sorted(abs(e) for e in errors)
    p90 = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    print(f"{name:<26} n {len(errors):>3}  median {statistics.median(sizes):7.2%}  "
          f"P90 {p90:7.2%}  max {sizes[-1]:8.2%}  signed mean {statistics.mean(errors):+8.2%}")


def printed(case: Case, unit: str) -> float | None:
    """SimuMax's own error, from the notes of its rows."""
    match = re.search(rf"{unit} \(([+-][\d.]+)%\)", case.row["notes"])
    return float(match.group(1)) / 100 if match else None


def megatron_error(case: Case) -> float:
    """Error of Megatron-LM's theoretical memory usage on the same row.

    Weights and optimizer of the fullest rank, and activations with sequence parallelism and
    selective recomputation; expert activations are not part of it.
    """
    assert case.memory is not None and case.measured_memory, "rows with a reading only"
    lines = case.memory.lines
    states = sum(lines[k] for k in ("base_weights", "gradients", "moments", "masters"))
    row = case.row
    h, f, layers, vocab = _megatron_sizes(row)
    tp, pp, tokens = degree(row, "tp"), degree(row, "pp"), degree(row, "seq") * degree(row, "mbs")
    activations = tokens * h * (18 + 4 * f / h) * layers + 8 * tokens * pp + tokens * h * pp
    if pp == 1:
        activations += tokens * h * 4 * (1 + vocab / h)
    return (states + activations / tp) / case.measured_memory - 1


def _megatron_sizes(row: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Hidden size, width of a dense block (of an expert where there is none), layers, vocabulary."""
    outline = outline_for(row, json.loads(MODELS.read_text(encoding="utf-8")))
    ffns = [layer.ffn for layer in outline.layers]
    dense = next((ffn for ffn in ffns if isinstance(ffn, DenseSpec)), ffns[0])
    return outline.hidden_size, dense.intermediate_size, outline.num_layers, outline.vocab_size


def fit_table(found: list[Case]) -> None:
    """Whether runs that ended out of memory, and those that did not, are told apart."""
    right = wrong = close = 0
    for case in found:
        outcome = case.row["outcome"]
        if case.memory is None or outcome not in ("oom", "fits", "does-not-fit"):
            continue
        fits = case.memory.total <= case.capacity * MEMORY_SHARE
        alone = case.memory.allocated <= case.capacity * MEMORY_SHARE
        good = fits == (outcome == "fits")
        right, wrong = right + good, wrong + (not good)
        close += good and (alone != fits)
        if not good:
            print(f"  wrong: {case.row['id']} {case.row['model']} {outcome}, "
                  f"{case.memory.total / 2**30:.1f} of {case.capacity / 2**30:.1f} GiB")
    print(f"\nfit or out of memory: {right} right, {wrong} wrong (limit {MEMORY_SHARE:.0%} of the "
          f"device; {close} need what is beside allocated bytes)")


def ordering(found: list[Case]) -> None:
    """Kendall's tau and the regret of the predicted best, on sweeps of one model and machine."""
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for case in found:
        if case.seconds and case.measured_seconds and case.block in ("H800 sweep", "ModelZoo"):
            tokens = (number(case.row, "gbs") or 1) * (number(case.row, "seq") or 1)
            key = (case.block, case.row["model"], case.row["precision"])
            groups[key].append((case.seconds / tokens, case.measured_seconds / tokens))
    for key, pairs in groups.items():
        if len(pairs) < 4:
            continue
        signs = [math.copysign(1, (a[0] - b[0]) * (a[1] - b[1]))
                 for a, b in combinations(pairs, 2) if a[1] != b[1] and a[0] != b[0]]
        same = sum(a[0] == b[0] for a, b in combinations(pairs, 2))
        chosen = min(pairs)
        regret = chosen[1] / min(p[1] for p in pairs) - 1
        print(f"ordering of {' '.join(key)}: n {len(pairs)}, tau {statistics.mean(signs):.2f} "
              f"({same} pairs are the same to the planner), regret {regret:.1%}")


def every_row(found: Iterable[Case], block: str) -> None:
    """Rows of one block."""
    known = factors(found)
    for case in found:
        if case.block != block:
            continue
        row = case.row
        memory, seconds = memory_error(case), time_error(case)
        factor = known.get(factor_key(row))
        words = [row["id"], row["model"][:28], row["hardware"][:8], row["precision"][:6],
                 "tp" + row["tp"], "pp" + row["pp"], "vpp" + row["vpp"], "ep" + row["ep"], "cp" + row["cp"],
                 "mbs" + row["mbs"], "n" + row["n_dev"], row["recompute"][:20],
                 "test" if case.is_test else ""]
        words.append("-" if memory is None else f"memory {memory:+.2%} of {case.measured_memory or 0:.4g}")
        words.append("-" if seconds is None else f"time {seconds:+.1%} of {case.measured_seconds:.4g} s")
        words.append("" if factor is None or seconds is None else f"calibrated {(1 + seconds) * factor - 1:+.1%}")
        print(" ".join(words))


if __name__ == "__main__":
    sys.exit(main())
