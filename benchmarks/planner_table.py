"""Tables of published runs: columns, and what a cell may hold.

Knows: the head of `published_runs.csv`. Does not know: models, plans. A cell that cannot be read is
a fault that names row, field and value; its row is left out, the others are used.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

COLUMNS = (
    "id", "group", "task", "model", "hf_id", "layers", "hardware", "n_dev", "tp", "pp", "vpp", "ep",
    "etp", "cp", "dp", "shard", "mbs", "gbs", "seq", "precision", "optimizer", "recompute",
    "dispatcher", "overlap_graphs", "routing", "lora", "step_time_s", "tok_s_dev", "tflops_dev",
    "mem_alloc", "mem_reserved", "mem_unit", "mem_scope", "outcome", "framework", "date", "grade",
    "source", "notes",
)
_COUNTS = ("layers", "n_dev", "tp", "pp", "ep", "etp", "cp", "dp", "mbs", "gbs")
_AMOUNTS = ("step_time_s", "tok_s_dev", "tflops_dev", "mem_alloc", "mem_reserved")
# Text in these two is a length or schedule without a fixed number, which is not a fault.
_COUNT_OR_TEXT = ("seq", "vpp")
_WORDS: dict[str, tuple[str, ...]] = {
    "precision": ("", "BF16", "FP8", "MXFP8", "NVFP4", "MXFP4", "INT8", "INT4", "FP16", "FP32", "see yaml"),
    "mem_unit": ("", "GiB", "GB"),
    "outcome": ("", "ok", "oom", "fits", "does-not-fit", "recipe-only", "estimate"),
    "task": ("pretrain", "sft", "lora", "draft-training", "inference", "microbench", "checkpoint",
             "forward-only", "dpo", "rlhf"),
    "grade": ("", "A", "B", "C"),
}
_HINT = {"mem_unit": "GiB or GB", "outcome": "as the table's legend lists", "grade": "A, B or C"}


class TableError(SystemExit):
    """A file that is no such table; its text is printed and ends the program."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a table; lines that begin with # are its legend, columns may stand in any order.

    Raises:
        TableError: a column is missing, a row has more or fewer cells, or two rows have one id.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(line for line in file if not line.startswith("#"))
            head = [name.strip() for name in next(reader, [])]
            body = [(reader.line_num, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: {error}") from None
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        raise TableError(f"{path}: no column {', '.join(missing)}; a table needs {', '.join(COLUMNS)}")
    rows = []
    for line, cells in body:
        if len(cells) != len(head):
            name = cells[head.index("id")] if len(cells) > head.index("id") else "?"
            raise TableError(f"{path}: row {name} (line {line} after the legend) has {len(cells)} cells, "
                             f"the head has {len(head)}")
        rows.append(dict(zip(head, (cell.strip() for cell in cells), strict=True)))
    twice = {row["id"] for row in rows if sum(other["id"] == row["id"] for other in rows) > 1}
    if twice:
        raise TableError(f"{path}: rows with one id: {', '.join(sorted(twice))}")
    return rows


def unknown_columns(rows: list[dict[str, str]]) -> list[str]:
    """Columns that are read but not used."""
    return sorted(set(rows[0]) - set(COLUMNS)) if rows else []


def faults(row: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the cells of a row, each with field, value and rule."""
    for field in ("id", "group", "model", "hardware", "framework"):
        if not row[field]:
            yield f"{field}: is empty"
    for field in _COUNTS:
        if row[field] and not _is_count(row[field]):
            yield f"{field}: `{row[field]}` is not a whole number above 0"
    for field in _COUNT_OR_TEXT:
        if re.match(r"[-\d.]+$", row[field]) and not _is_count(row[field]):
            yield f"{field}: `{row[field]}` is not a whole number above 0"
    for field in _AMOUNTS:
        if row[field] and not _is_amount(row[field]):
            yield f"{field}: `{row[field]}` is not a number above 0"
    for field, words in _WORDS.items():
        if not any(row[field] == word or (word and row[field].startswith(word)) for word in words):
            yield f"{field}: `{row[field]}` is unknown; expected {_HINT.get(field, ', '.join(filter(None, words)))}"
    if (row["mem_alloc"] or row["mem_reserved"]) and not row["mem_unit"]:
        yield "mem_unit: is empty beside a reading of memory; expected GiB or GB"


def number(row: Mapping[str, str], key: str) -> float | None:
    """A number, None where the cell is empty or text."""
    try:
        return float(row[key])
    except ValueError:
        return None


def degree(row: Mapping[str, str], key: str) -> int:
    """A parallel degree, 1 where the cell is empty."""
    found = number(row, key)
    return 1 if found is None else int(found)


def _is_count(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return value >= 1 and value == int(value) if value < float("inf") else False


def _is_amount(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return 0 < value < float("inf")
