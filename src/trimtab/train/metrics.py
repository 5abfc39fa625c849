"""metrics.jsonl: one JSON object per step, each step once, also after a kill.

Knows: rows and their file. Does not know: what the numbers mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

Row = Mapping[str, object]


class MetricsWriter:
    """Appends rows to a file; each row is on disk's side of the process when `write` returns.

    Args:
        path: the file; created with its directory where missing.
        keep_through: rows of a later step are removed first, as is a half-written last line, so
            that a resumed run writes each step once.
    """

    def __init__(self, path: Path, *, keep_through: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(path, keep_through)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append one row and flush it."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, object]]:
    """Whole rows of a metrics file in order; a half-written last line is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def truncate_after(path: Path, step: int) -> None:
    """Drop the rows of later steps, and a half-written last line, from a file if it is there."""
    if not path.exists():
        return
    rows = [row for row in read_metrics(path) if int(str(row["step"])) <= step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
