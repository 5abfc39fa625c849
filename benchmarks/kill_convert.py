"""Kills a conversion at random moments and compares what comes out in the end.

    python -m benchmarks.kill_convert SCRATCH [--kills 20] [--seed 1]

A checkpoint of one K3 layer is converted once undisturbed, then into another directory by processes
that are killed (SIGKILL) after a random time until one of them ends by itself. Every file of both
directories must have the same SHA-256.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.k3_layer import write_checkpoint
from trimtab.checkpoint.manifest import file_sha256

EXPERTS, WORDS = 16, 512


def command(src: Path, dst: Path) -> list[str]:
    return [sys.executable, "-m", "trimtab", "convert", str(src), "--out", str(dst), "--ep", "4",
            "--pp", "1", "--json"]


def hashes(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): file_sha256(path)
        for path in sorted(root.rglob("*")) if path.is_file()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    src, whole, killed = (options.scratch / name for name in ("model", "whole", "killed"))
    size = write_checkpoint(src, EXPERTS, WORDS)
    begun = time.perf_counter()
    subprocess.run(command(src, whole), check=True, capture_output=True)
    seconds = time.perf_counter() - begun
    draw, kills, starts = random.Random(options.seed), 0, 0
    while True:
        starts += 1
        process = subprocess.Popen(command(src, killed), stdout=subprocess.PIPE, text=True)
        # All kills together cost about twice the time of the whole conversion, plus its starts.
        limit = draw.uniform(0.3, 0.6 + 2 * seconds / options.kills)
        try:
            output, _ = process.communicate(timeout=limit if kills < options.kills else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        if process.returncode:
            raise SystemExit(f"a conversion failed: {process.returncode}")
        last = json.loads(output)
        if kills == options.kills:
            break
        shutil.rmtree(killed)  # it was done before the last kill: once more from the beginning
    same = hashes(whole) == hashes(killed)
    print(f"{size / 1e9:.1f} GB, {kills} kills in {starts} starts; the last one wrote "
          f"{last['written'] / 1e6:.0f} MB, {last['resumed'] / 1e6:.0f} MB were there; "
          f"{len(hashes(whole))} files {'equal' if same else 'DIFFER'}")
    shutil.rmtree(options.scratch)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
