"""Records held out by content: copies stay together, places in the file do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.data.holdout import content_hash, split_records
from trimtab.data.records import open_records
from trimtab.errors import DataError


def write(path: Path, words: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": w, "completion": w[::-1]}) + "\n" for w in words))
    return path


def held(path: Path, share: float) -> list[int]:
    return [content_hash(r) for r in _records(split_records(open_records(path), share).held_out)]


def _records(subset):  # type: ignore[no-untyped-def]
    return [subset.record(i) for i in range(len(subset))]


def test_the_split_is_by_content_and_near_the_share(tmp_path: Path) -> None:
    words = [f"word {i}" for i in range(400)]
    split = split_records(open_records(write(tmp_path / "a.jsonl", words)), 0.1)
    assert 20 <= len(split.held_out) <= 60 and len(split.held_out) + len(split.training) == 400
    assert held(tmp_path / "a.jsonl", 0.1) == held(write(tmp_path / "b.jsonl", words[::-1]), 0.1)
    # A smaller share holds out a part of what a larger one does.
    assert set(held(tmp_path / "a.jsonl", 0.05)) < set(held(tmp_path / "a.jsonl", 0.1))


def test_copies_fall_on_one_side(tmp_path: Path) -> None:
    words = [f"word {i % 50}" for i in range(200)]
    split = split_records(open_records(write(tmp_path / "a.jsonl", words)), 0.3)
    sides = [{content_hash(r) for r in _records(side)} for side in (split.training, split.held_out)]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_neither_side_is_ever_empty_and_copies_of_one_record_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    for share in (1e-12, 0.5):
        split = split_records(open_records(path), share)
        assert (len(split.training), len(split.held_out)) == (1, 1)
    with pytest.raises(DataError, match=r"TT402.*held out"):
        split_records(open_records(write(tmp_path / "b.jsonl", ["one", "one"])), 0.5)


def test_a_broken_record_stays_with_the_training_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f"word {i}" for i in range(20)])
    path.write_text(path.read_text() + "{broken\n")
    split = split_records(open_records(path), 0.5)
    with pytest.raises(DataError, match="TT401"):
        split.training.record(len(split.training) - 1)
