"""Records held out of training by the hash of their content.

Knows: records. Does not know: tokens, what the held-out ones are used for.

The hash covers what is trained on: text, messages, tools and the bytes or paths of images. Copies
of a record therefore fall on the same side, wherever they stand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.data.image_source import ImageSource
from trimtab.data.records import Record, RecordFile
from trimtab.errors import DataError

_HASHES = 2**64


class RecordSubset:
    """Some records of a file, in the order given.

    Args:
        file: the whole.
        indices: records of it.
    """

    def __init__(self, file: RecordFile, indices: NDArray[np.int64]) -> None:
        self.path, self.num_bytes, self.form = file.path, file.num_bytes, file.form
        self._file, self._indices = file, indices

    def __len__(self) -> int:
        return len(self._indices)

    def record(self, index: int) -> Record:
        """Record `index` of the subset."""
        return self._file.record(int(self._indices[index]))

    def where(self, index: int) -> str:
        """`file:line` of record `index` of the subset."""
        return self._file.where(int(self._indices[index]))


@dataclass(frozen=True, slots=True)
class Split:
    """A file cut in two.

    Args:
        training: in file order.
        held_out: in the order of their hashes, which is no order of the file.
    """

    training: RecordSubset
    held_out: RecordSubset


def split_records(file: RecordFile, share: float) -> Split:
    """Hold out about `share` of the distinct records of a file, at least one.

    A record that cannot be read stays with the training records, where the recipe says what
    becomes of it.

    Args:
        file: every record is read once.
        share: above 0 and at most 0.5.

    Raises:
        DataError: TT402, all records of the file are copies of one.
    """
    hashes = [_hash_or_none(file, index) for index in range(len(file))]
    known = sorted({value for value in hashes if value is not None})
    if len(known) < 2:
        raise DataError("TT402", file.path, "holds no second record, so that none can be held out",
                        hint="set the holdout under `validate` to 0")
    # The smallest hash is always held out and the largest never, so that neither side is empty.
    limit = min(max(int(share * _HASHES), known[0] + 1), known[-1])
    held = [(value, index) for index, value in enumerate(hashes) if value is not None and value < limit]
    rest = [index for index, value in enumerate(hashes) if value is None or value >= limit]
    return Split(_subset(file, rest), _subset(file, [index for _, index in sorted(held)]))


def content_hash(record: Record) -> int:
    """The first 64 bits of the SHA-256 of what a record holds."""
    text = json.dumps(
        [record.text, list(record.messages), record.tools], sort_keys=True, default=_plain,
    )  # fmt: skip
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _plain(value: object) -> object:
    if isinstance(value, ImageSource):
        if value.data is None:
            return value.path or value.url
        return hashlib.sha256(value.data).hexdigest()
    return str(value)


def _hash_or_none(file: RecordFile, index: int) -> int | None:
    try:
        return content_hash(file.record(index))
    except DataError:
        return None


def _subset(file: RecordFile, indices: Sequence[int]) -> RecordSubset:
    return RecordSubset(file, np.asarray(indices, np.int64))
