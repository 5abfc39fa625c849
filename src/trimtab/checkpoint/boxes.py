"""Boxes: rows and columns of a stored matrix as byte ranges, out of it and back into it.

Knows: the arithmetic of row-major matrices. Does not know: files, tensors, numpy.
"""

from __future__ import annotations

from collections.abc import Callable

# Rows of a cut are read so many bytes at a time.
_CHUNK_BYTES = 2**20
# Rows of a box that are longer than this are read one by one, others with what lies between.
_LONG_ROW_BYTES = 2**17

Read = Callable[[int, memoryview], None]
"""Fills a view from an offset."""


def gather(
    read: Read, pitch: int, first_row: int, skip: int, width: int,
    start: int, out: memoryview,
) -> None:
    """Fill `out` from a box of rows.

    Args:
        read: fills a view from an offset of the stored tensor.
        pitch: bytes of a stored row.
        first_row: first row of the box.
        skip: bytes of each row before the box.
        width: bytes of each row in the box.
        start: where in the box, laid out row by row, `out` begins.
        out: any range of the box.
    """
    done = 0
    rows_at_once = 1 if width >= _LONG_ROW_BYTES else max(1, _CHUNK_BYTES // pitch)
    buffer = memoryview(b"")
    while done < len(out):
        row, within = divmod(start + done, width)
        if rows_at_once == 1:
            count = min(width - within, len(out) - done)
            read((first_row + row) * pitch + skip + within, out[done : done + count])
            done += count
            continue
        last = min(row + rows_at_once, (start + len(out) - 1) // width + 1)
        if not len(buffer):
            buffer = memoryview(bytearray(rows_at_once * pitch))
        # From the first wanted byte of the first row to the last of the last one.
        span = (last - row - 1) * pitch + width
        read((first_row + row) * pitch + skip, buffer[:span])
        for number in range(last - row):
            low = within if number == 0 else 0
            count = min(width - low, len(out) - done)
            begin = number * pitch + low
            out[done : done + count] = buffer[begin : begin + count]
            done += count


def gathered_bytes(rows: int, width: int, pitch: int) -> int:
    """Bytes that `gather` reads for a whole box.

    >>> gathered_bytes(4, 10, 10), gathered_bytes(4, 10, 20)
    (40, 70)
    """
    if width == pitch or width >= _LONG_ROW_BYTES:
        return rows * width
    chunks = -(-rows // max(1, _CHUNK_BYTES // pitch))
    return rows * pitch - chunks * (pitch - width)


def scatter(
    read: Read, pitch: int, rows: range, skip: int, width: int, start: int, out: memoryview
) -> None:
    """Put what a box holds of a range of its matrix into the right places.

    Args:
        read: fills a view from an offset of the box, which lies row by row.
        pitch: bytes of a row of the matrix.
        rows: rows of the matrix that the box holds.
        skip: bytes of each row before the box.
        width: bytes of each row in the box.
        start: offset of `out` in the matrix.
        out: any range of the matrix; bytes outside the box are left as they are.
    """
    end = start + len(out)
    if width == pitch:
        low, high = max(start, rows.start * pitch), min(end, rows.stop * pitch)
        if low < high:
            read(low - rows.start * pitch, out[low - start : high - start])
        return
    first, last = max(rows.start, start // pitch), min(rows.stop, -(-end // pitch))
    at_once = max(1, _CHUNK_BYTES // width)
    buffer = memoryview(bytearray(min(at_once, max(0, last - first)) * width))
    for begin in range(first, last, at_once):
        count = min(at_once, last - begin)
        read((begin - rows.start) * width, buffer[: count * width])
        for number in range(count):
            place = (begin + number) * pitch + skip
            low, high = max(start, place), min(end, place + width)
            if low < high:
                at = number * width - place
                out[low - start : high - start] = buffer[at + low : at + high]
