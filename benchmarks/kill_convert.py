"""Kills a conversion at random moments and compares what comes out in the end.

    python -m benchmarks.kill_convert SCRATCH [--kills 20] [--seed 1]

A checkpoint of one K3 layer is converted once undisturbed, then by processes that are killed
(SIGKILL) after a random number of bytes. Whenever one of them comes to its end, every file must have
the SHA-256 of the undisturbed conversion; then another conversion begins, until all kills are done.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
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


def on_disk(root: Path) -> int:
    """Bytes in the weight files of a directory, finished or not."""
    found = 0
    for path in root.glob("*.safetensors*"):
        with suppress(FileNotFoundError):  # it has just got its name
            found += path.stat().st_size
    return found


def killed_after(num_bytes: float, src: Path, dst: Path) -> str | None:
    """Run a conversion and kill it when it has written so much; its output if it ended before."""
    process = subprocess.Popen(command(src, dst), stdout=subprocess.PIPE, text=True)
    begin = on_disk(dst)
    while process.poll() is None:
        if on_disk(dst) - begin >= num_bytes:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    output, _ = process.communicate()
    if process.returncode == -signal.SIGKILL:
        return None
    if process.returncode:
        raise SystemExit(f"a conversion failed: {process.returncode}")
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    src, whole, killed = (options.scratch / name for name in ("model", "whole", "killed"))
    size = write_checkpoint(src, EXPERTS, WORDS)
    subprocess.run(command(src, whole), check=True, capture_output=True)
    wanted = hashes(whole)
    draw, kills, ends, resumed, same = random.Random(options.seed), 0, 0, 0, True
    while kills < options.kills or killed.exists():
        limit = draw.uniform(0, 0.6) * size if kills < options.kills else math.inf
        output = killed_after(limit, src, killed)
        if output is None:
            kills += 1
            continue
        ends += 1
        resumed += json.loads(output)["resumed"]
        same = same and hashes(killed) == wanted
        shutil.rmtree(killed)
    print(f"{size / 1e9:.1f} GB, {kills} kills, {ends} conversions came to their end; on average the "
          f"last start of each found {resumed / ends / 1e6:.0f} MB; all {len(wanted)} files "
          f"{'equal' if same else 'DIFFER'}")
    shutil.rmtree(options.scratch)
    if not same or not resumed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
