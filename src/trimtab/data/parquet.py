"""Parquet files of records, such as image data sets with `messages` and `images` columns.

Knows: row groups. Does not know: what a record means. Needs the extra `parquet`.

Records are taken in random order, so a few decoded row groups are kept; a file of many images
should have row groups of a few hundred rows.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np

from trimtab.config.data import Form
from trimtab.data.forms import KEYS, detect_form
from trimtab.data.records import Record, record_of
from trimtab.errors import DataError

_KEPT_GROUPS = 4


class ParquetFile:
    """Random access to the rows of a file; `record` raises as for `JsonlFile`.

    Args:
        path: Parquet file with columns named like the keys of a JSONL record.
        form: of its records; None to find out from the first one.
        last_only: only the last answer of a record is trained on.

    Raises:
        DataError: TT604 without pyarrow, TT107 where there is no file, TT401 where it is no
            Parquet file, TT402 where it has no row.
    """

    def __init__(self, path: str | Path, form: Form | None = None, *, last_only: bool = False) -> None:
        try:
            import pyarrow as arrow  # type: ignore[import-untyped] # it ships no types
            import pyarrow.parquet as parquet  # type: ignore[import-untyped]
        except ImportError:
            raise DataError("TT604", str(path), "reading Parquet needs pyarrow",
                            hint="pip install 'trimtab[parquet]'") from None  # fmt: skip
        self.path = str(path)
        try:
            self.num_bytes = Path(path).stat().st_size
            self._file = parquet.ParquetFile(path)
        except OSError as error:
            raise DataError("TT107", self.path, f"cannot be read: {error.strerror}") from None
        except arrow.ArrowInvalid as error:
            raise DataError("TT401", self.path, f"is not a Parquet file: {error}") from None
        metadata = self._file.metadata
        sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        if not metadata.num_rows:
            raise DataError("TT402", self.path, "has no record")
        self._columns = [c for c in self._file.schema_arrow.names if c in KEYS]
        self._groups: OrderedDict[int, list[dict[str, object]]] = OrderedDict()
        self._forced, self._last_only = form, last_only
        self.form: Form = form or detect_form(self._value(0))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where(self, index: int) -> str:
        """`file:row` of record `index`, rows counted from 1."""
        return f"{self.path}:{index + 1}"

    def record(self, index: int) -> Record:
        """Record `index`, counted from 0."""
        return record_of(
            self._value(index), self.where(index), str(Path(self.path).parent), self.form,
            forced=self._forced is not None, last_only=self._last_only,
        )

    def _value(self, index: int) -> dict[str, object]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        rows = self._rows(group)
        row = rows[index - int(self._ends[group])]  # negative: counted from the group's end
        return {key: item for key, item in row.items() if item is not None}

    def _rows(self, group: int) -> list[dict[str, object]]:
        if group not in self._groups:
            table = self._file.read_row_group(group, columns=self._columns)
            self._groups[group] = table.to_pylist()
            if len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]
