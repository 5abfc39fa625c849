"""`trimtab plan --calibrate`: measure this machine into a cluster document."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from trimtab.parallel.calibrate import calibrate


def write_calibration(ranks: int | None, out: Path | None, as_json: bool) -> None:
    """Measure and write the document, to stdout where no file is named."""
    text = calibrate(ranks, lambda words: sys.stderr.write(f"measuring {words}\n"))
    if as_json:
        sys.stdout.write(json.dumps(yaml.safe_load(text)) + "\n")
    if out is not None:
        out.write_text(text, encoding="utf-8")
        sys.stderr.write(f"next: trimtab plan --cluster {out} --devices {ranks or 1} --model MODEL\n")
    elif not as_json:
        sys.stdout.write(text)
