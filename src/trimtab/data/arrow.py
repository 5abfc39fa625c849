"""Data sets that Hugging Face's `datasets` has saved to disk: a directory of Arrow files.

Knows: state.json, which names the files in order, and their rows. Does not know: what a record
means. Needs the extra `parquet`.

The files are mapped, not read: a record costs the pages it lies on.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trimtab.config.data import Form
from trimtab.data.forms import KEYS, detect_form
from trimtab.data.records import Record, record_of
from trimtab.errors import DataError

STATE = "state.json"
_SPLITS = "dataset_dict.json"


class ArrowDirectory:
    """Random access to the rows of a saved data set; `record` raises as for `JsonlFile`.

    Args:
        path: directory with state.json.
        form: of its records; None to find out from the first one.
        last_only: only the last answer of a record is trained on.

    Raises:
        DataError: TT604 without pyarrow, TT401 where it is no such directory, TT402 where it has
            no row.
    """

    def __init__(self, path: str | Path, form: Form | None = None, *, last_only: bool = False) -> None:
        try:
            import pyarrow as arrow  # type: ignore[import-untyped] # it ships no types
        except ImportError:
            raise DataError("TT604", str(path), "reading Arrow files needs pyarrow",
                            hint="pip install 'trimtab[parquet]'") from None  # fmt: skip
        self.path, self._last_only = str(path), last_only
        files = _files(Path(path))
        self._tables = []
        for file in files:
            try:
                with arrow.memory_map(str(file)) as mapped:
                    self._tables.append(arrow.ipc.open_stream(mapped).read_all())
            except (OSError, arrow.ArrowInvalid) as error:
                raise DataError("TT401", str(file), f"is not an Arrow stream: {error}") from None
        self.num_bytes = sum(file.stat().st_size for file in files)
        self._ends = np.cumsum([table.num_rows for table in self._tables], dtype=np.int64)
        if not len(self):
            raise DataError("TT402", self.path, "has no record")
        self._forced = form
        self.form: Form = form or detect_form(self._row(0))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def where(self, index: int) -> str:
        """`directory:row` of record `index`, rows counted from 1."""
        return f"{self.path}:{index + 1}"

    def record(self, index: int) -> Record:
        """Record `index`, counted from 0."""
        return record_of(self._row(index), self.where(index), self.path, self.form,
                         forced=self._forced is not None, last_only=self._last_only)

    def _row(self, index: int) -> dict[str, object]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        table = self._tables[number]
        start = index - (int(self._ends[number - 1]) if number else 0)
        columns = [name for name in table.column_names if name in KEYS]
        row = table.select(columns).slice(start, 1).to_pylist()[0]
        return {key: item for key, item in row.items() if item is not None}


def arrow_files(path: Path) -> list[Path]:
    """The Arrow files of a saved data set in order, empty for any other path."""
    return _files(path) if (path / STATE).is_file() else []


def _files(path: Path) -> list[Path]:
    if (path / _SPLITS).is_file():
        splits = json.loads((path / _SPLITS).read_bytes()).get("splits", [])
        raise DataError("TT401", str(path), f"holds several splits: {', '.join(splits)}",
                        hint=f"name one, such as {path / str(splits[0])}" if splits else None)
    if not (path / STATE).is_file():
        raise DataError("TT401", str(path), f"is a directory without {STATE}",
                        hint="name a file, or a directory that `Dataset.save_to_disk` wrote")
    try:
        listed = json.loads((path / STATE).read_bytes())["_data_files"]
        names = [str(entry["filename"]) for entry in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("TT401", str(path / STATE), f"names no data files: {error}") from None
    root = path.resolve()
    for name in names:
        if root not in (path / name).resolve().parents:
            raise DataError("TT401", str(path / STATE), "names a file outside its directory",
                            value=name)
    return [path / name for name in names]
