"""How many images a file of records has and how many tokens they take, before anything is trained.

Knows: record files, the heads of image files. Does not know: pixels, models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.config.data import DataSection
from trimtab.data.encode import encode_record
from trimtab.data.image_source import message_images
from trimtab.data.prompt import ImageProcessor, may_leave_out
from trimtab.data.records import Record, RecordFile
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError


@dataclass(slots=True)
class ImageTotals:
    """Totals over the records that were looked at.

    Args:
        looked_at: records.
        records: those with images.
        images: how many.
        sizes: number of images by tokens they take.
        left_out: records that the recipe leaves out because of their images.
        too_long: images with more tokens than a pack holds, which no record can keep.
    """

    looked_at: int = 0
    records: int = 0
    images: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    left_out: int = 0
    too_long: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all images."""
        return sum(size * count for size, count in self.sizes.items())

    def __str__(self) -> str:
        if not self.images:
            return f"no images in {self.looked_at:,} records"
        text = (
            f"{self.images:,} images in {self.records:,} of {self.looked_at:,} records, "
            f"{min(self.sizes):,} to {max(self.sizes):,} tokens each, "
            f"{self.tokens / self.images:,.1f} on average"
        )
        if self.left_out:
            text += f"; {self.left_out:,} records left out"
        if self.too_long:
            text += f"; {self.too_long:,} images longer than max_seq_len, their records end there"
        return text


def count_images(
    file: RecordFile,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    data: DataSection,
    limit: int | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> ImageTotals:
    """Read the heads of all images; encode one record whole to see that its tokens come out.

    Args:
        file: records.
        tokenizer: of the model.
        processor: of the model; None for a model of text only.
        data: says which records may be left out.
        limit: how many records to look at; None for all.
        advance: told (records done, records in all).

    Raises:
        DataError: TT401, TT406, TT407 unless the recipe leaves such records out; TT407 where the
            template and the processor disagree on the number of tokens.
    """
    total = ImageTotals()
    count = len(file) if limit is None else min(limit, len(file))
    for index in range(count):
        total.looked_at += 1
        try:
            record = file.record(index)
            sizes = _token_counts(record, processor)
            if sizes and not total.images:
                _check_encoding(record, tokenizer, processor, sum(sizes))
        except DataError as error:
            if not may_leave_out(error, data):
                raise
            total.left_out += 1
            continue
        total.records += bool(sizes)
        total.images += len(sizes)
        total.sizes.update(sizes)
        total.too_long += sum(size > data.max_seq_len for size in sizes)
        if advance is not None:
            advance(index + 1, count)
    return total


def has_images(file: RecordFile) -> bool:
    """Whether any record of a file has an image; unreadable records are left to their reader."""
    for index in range(len(file)):
        try:
            if message_images(file.record(index).messages):
                return True
        except DataError:
            continue
    return False


def _token_counts(record: Record, processor: ImageProcessor | None) -> list[int]:
    sources = message_images(record.messages)
    if sources and processor is None:
        raise DataError("TT407", sources[0].where, "is an image, and the model takes text only")
    return [processor.count(source) for source in sources] if processor else []


def _check_encoding(
    record: Record, tokenizer: Tokenizer, processor: ImageProcessor | None, expected: int
) -> None:
    encoded = encode_record(record, tokenizer, processor)
    assert processor is not None, "a record with images was counted"
    found = int((encoded.token_ids == processor.token_id).sum())
    if not found == expected == len(encoded.image_rows):
        raise DataError("TT407", record.where, f"has {found} placeholder tokens; its images take "
                        f"{expected}")  # fmt: skip
