"""Run the operator benchmarks and store their rows.

    python -m benchmarks.ops kda moe --out benchmarks/results/ops_cpu_202612.jsonl
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import torch

from benchmarks import harness, ops


def main() -> int:
    """Parse the command line, run, print, store; 1 where a limit is missed."""
    names = [module.name for module in pkgutil.iter_modules(ops.__path__) if not module.name.startswith("_")]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(names)}; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON lines file that rows are added to")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    torch.set_num_threads(args.threads)
    missed = 0
    for name in args.names or names:
        results: list[harness.Result] = importlib.import_module(f"benchmarks.ops.{name}").run()
        for result in results:
            print(result.as_line(), flush=True)
            missed += not result.passed
        if args.out:
            harness.append_rows(args.out, f"ops.{name}", [result.as_row() for result in results])
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
