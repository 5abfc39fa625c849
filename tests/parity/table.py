"""Write the parity table: `python -m tests.parity.table docs/parity.md`."""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.parity.cases import CASES, Row, rows
from trimtab.verify.tolerances import limit

HEADER = """\
# Parity with outside references

Written by `python -m tests.parity.table docs/parity.md`; the same cases are tests
(`tests/parity/test_models.py`). K3 and K3.1 are compared with an independent naive float64 model
that lives in `tests/oracles`, all other families with transformers {transformers}. Checkpoints are
random, in the released file format, and are read through the real weight maps. Errors are relative
to the largest magnitude of a tensor; gradients are the worst over all released tensors. In float32
K3 is compared with the float64 model, the others with transformers in float32.

torch {torch}, {machine}.

| model | check | dtype | measured | limit | |
|---|---|---|---:|---:|---|
"""


def line(row: Row) -> str:
    bound = limit(row.kind)
    verdict = "pass" if row.measured <= bound else "FAIL"
    return (
        f"| {row.model} | {row.check} | {row.dtype} | {row.measured:.1e} | {bound:.0e} "
        f"| {verdict} |\n"
    )


def main() -> None:
    text = HEADER.format(
        transformers=transformers.__version__, torch=torch.__version__.split("+")[0],
        machine=f"{platform.system()} {platform.machine()}",
    )
    for model in CASES:
        for dtype in ("float64", "float32"):
            with tempfile.TemporaryDirectory() as folder:
                text += "".join(line(row) for row in rows(model, Path(folder), dtype))
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
