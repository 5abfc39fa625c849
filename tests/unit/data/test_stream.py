"""Packs: same content as the records apart, exact length, and an exact restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.config.data import DataSection
from trimtab.data.encode import Encoded, encode_record
from trimtab.data.packing import IGNORED, Pack, RowFiller, build_pack
from trimtab.data.records import read_records
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError, RunError

Writer = Callable[[str, Iterable[object]], str]


def record(length: int, seed: int = 0) -> Encoded:
    words = np.random.default_rng([length, seed])
    return Encoded(words.integers(0, 250, length), words.random(length) < 0.5, length)


def same(first: Pack, second: Pack) -> bool:
    return first.index == second.index and all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in ("input_ids", "labels", "cu_seqlens", "valid")
    )


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(0, 30))
def test_pack_holds_each_record_as_if_it_were_alone(lengths: list[int], padding: int) -> None:
    records = [record(n, i) for i, n in enumerate(lengths)]
    total = sum(lengths)
    pack = build_pack(3, records, ["a"] * len(records), total + padding, pad_id=255)
    assert pack.lengths == [*lengths[:-1], lengths[-1] + padding]
    assert pack.valid.sum() == total and pack.valid[:total].all()
    assert (pack.input_ids[total:] == 255).all() and (pack.labels[total:] == IGNORED).all()
    begin = 0
    for item in records:
        alone = build_pack(0, [item], ["a"], len(item), pad_id=255)
        stretch = slice(begin, begin + len(item))
        assert np.array_equal(pack.input_ids[stretch], alone.input_ids)
        assert np.array_equal(pack.labels[stretch], alone.labels)
        begin += len(item)
    assert pack.num_supervised == sum(item.num_supervised for item in records)


def test_labels_are_the_next_supervised_token() -> None:
    item = Encoded(np.array([5, 6, 7, 8]), np.array([True, False, True, True]), 4)
    pack = build_pack(0, [item, item], ["a", "b"], 9, pad_id=0)
    assert pack.labels.tolist() == [-100, 7, 8, -100, -100, 7, 8, -100, -100]
    assert pack.tokens_by_source == {"a": 4, "b": 4}


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.booleans())
def test_filler_loses_and_repeats_no_record(lengths: list[int], packing: bool) -> None:
    filler: RowFiller[int] = RowFiller(16, packing)
    drawn = iter(list(enumerate(record(n) for n in lengths)))
    dealt: list[int] = []
    exhausted = False
    while not exhausted or filler.waiting:
        row, free = filler.open_row()
        while not exhausted and filler.wants_more(row, free):
            item = next(drawn, None)
            exhausted = item is None
            if item is not None:
                free = filler.add(row, free, item)
        assert sum(len(r) for _, r in row) == 16 - free <= 16
        assert packing or len(row) <= 1
        dealt += [tag for tag, _ in row]
    assert sorted(dealt) == list(range(len(lengths)))


def section(jsonl: Writer, **values: object) -> DataSection:
    domain = [{"prompt": f"q{i}", "completion": "a" * (1 + i % 7)} for i in range(23)]
    general = [{"text": "word " * (1 + i)} for i in range(9)]
    return DataSection.model_validate(
        {
            "domain": {"path": jsonl("domain.jsonl", domain)},
            "general": {"path": jsonl("general.jsonl", general)},
            "max_seq_len": 64,
            **values,
        }
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 7, 31])
def test_restart_continues_bit_for_bit(
    jsonl: Writer, tokenizer: Tokenizer, packing: bool, stop: int
) -> None:
    data = section(jsonl, packing=packing)
    stream = DataStream(data, tokenizer, 5)
    for _ in range(stop):
        stream.next_pack()
    state = json.loads(json.dumps(stream.state()))
    expected = [stream.next_pack() for _ in range(12)]
    restored = DataStream(data, tokenizer, 5)
    restored.restore(state)
    assert restored.position == stop
    assert all(same(pack, restored.next_pack()) for pack in expected)
    sought = DataStream(data, tokenizer, 5)
    sought.seek(stop + 20)
    sought.seek(stop)
    assert all(same(pack, sought.next_pack()) for pack in expected)


def test_another_seed_is_another_stream(jsonl: Writer, tokenizer: Tokenizer) -> None:
    data = section(jsonl)
    packs = [DataStream(data, tokenizer, seed).next_pack() for seed in (5, 5, 6)]
    assert same(packs[0], packs[1]) and not same(packs[0], packs[2])


def test_shares_of_the_packs_follow_the_recipe(jsonl: Writer, tokenizer: Tokenizer) -> None:
    stream = DataStream(section(jsonl, domain_ratio=0.6, general_ratio=0.4), tokenizer, 1)
    packs = [stream.next_pack() for _ in range(100)]
    domain = sum(pack.tokens_by_source.get("domain", 0) for pack in packs)
    fed = sum(int(pack.valid.sum()) for pack in packs)
    assert abs(domain / fed - 0.6) < 0.02
    assert stream.counts["domain"].tokens >= domain
    assert all(len(pack.input_ids) == 64 == sum(pack.lengths) for pack in packs)


def test_changed_data_file_stops_a_restart(jsonl: Writer, tokenizer: Tokenizer) -> None:
    data = section(jsonl)
    state = DataStream(data, tokenizer, 5).state()
    jsonl("domain.jsonl", [{"text": "other"}])
    with pytest.raises(RunError, match="TT603"):
        DataStream(data, tokenizer, 5).restore(state)


def test_overlong_records_are_cut_skipped_or_refused(jsonl: Writer, tokenizer: Tokenizer) -> None:
    texts = [{"text": "x" * 100}, {"text": "short"}]
    base = {"domain": {"path": jsonl("d.jsonl", texts)}, "max_seq_len": 32}

    def stream(**values: object) -> DataStream:
        return DataStream(DataSection.model_validate({**base, **values}), tokenizer, 0)

    cut = stream()
    packs = [cut.next_pack() for _ in range(4)]
    assert cut.counts["domain"].truncated > 0 and "cut to 32 tokens" in cut.fed()[0]
    assert any(pack.valid.all() for pack in packs)
    skipping = stream(overlong="skip")
    assert set(skipping.next_pack().input_ids.tolist()) <= {*b"short", 257, 259}
    assert skipping.counts["domain"].skipped > 0
    with pytest.raises(DataError, match="has 101 tokens"):
        refusing = stream(overlong="error")
        for _ in range(2):
            refusing.next_pack()


def test_source_without_a_usable_record_stops(jsonl: Writer, tokenizer: Tokenizer) -> None:
    path = jsonl("d.jsonl", [{"text": "x" * 100}] * 3)
    data = {"domain": {"path": path}, "max_seq_len": 32, "overlong": "skip"}
    with pytest.raises(DataError, match="TT402"):
        DataStream(DataSection.model_validate(data), tokenizer, 0).next_pack()


def test_unreadable_records_stop_or_are_left_out(jsonl: Writer, tokenizer: Tokenizer) -> None:
    base = {"domain": {"path": jsonl("d.jsonl", [{"text": "fine"}, {"no": 1}])}, "max_seq_len": 32}
    with pytest.raises(DataError, match=r"d\.jsonl:2"):
        DataStream(DataSection.model_validate(base), tokenizer, 0).next_pack()
    data = DataSection.model_validate({**base, "on_error": "skip"})
    stream = DataStream(data, tokenizer, 0)
    stream.next_pack()
    assert stream.counts["domain"].skipped > 0


def test_what_is_left_out_is_named_once_with_its_line(jsonl: Writer, tokenizer: Tokenizer) -> None:
    records = [{"text": "fine"}, {"no": 1}, {"text": "x" * 100}, {"text": "well"}]
    path = jsonl("d.jsonl", records)
    data = {"domain": {"path": path}, "max_seq_len": 32, "on_error": "skip", "overlong": "skip"}
    stream = DataStream(DataSection.model_validate(data), tokenizer, 0)
    done: list[tuple[int, int]] = []
    stream.check_records(lambda n, total: done.append((n, total)))
    assert done[-1] == (4, 4)
    (line,) = stream.left_out()
    assert line.startswith(f"{path}: 1 of 4 records left out: {path}:2 (needs exactly one of")
    for _ in range(4):
        stream.next_pack()
    (line,) = stream.left_out()
    assert "2 of 4 records left out" in line and f"{path}:3 (too long)" in line
    (line,) = stream.fed()
    counts = stream.counts["domain"]
    assert line.startswith(f"domain: {counts.records:,} records with {counts.tokens:,} tokens")


def test_ids_beyond_the_model_are_refused(jsonl: Writer, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="TT403"):
        DataStream(section(jsonl), tokenizer, 0, vocab_size=258).next_pack()


def test_steps_for_epochs_feed_the_domain_that_often(jsonl: Writer, tokenizer: Tokenizer) -> None:
    data = section(jsonl)
    stream = DataStream(data, tokenizer, 0)
    steps = stream.steps_for_epochs(2, tokens_per_step=128)
    assert stream.position == 0
    for _ in range(steps * 2):
        stream.next_pack()
    assert 46 <= stream.counts["domain"].records < 46 * 1.3


def test_byte_count_is_that_of_the_supervised_text(jsonl: Writer, tokenizer: Tokenizer) -> None:
    path = jsonl("d.jsonl", [{"text": "caf\u00e9"}, {"prompt": "long one", "completion": "\u00e9"}])
    encoded = [encode_record(r, tokenizer) for r in read_records(path)]
    assert [e.num_bytes for e in encoded] == [5, 2]
    assert [e.num_supervised for e in encoded] == [5, 3]


def test_files_of_one_source_are_mixed_by_weight(jsonl: Writer, tokenizer: Tokenizer) -> None:
    paths = [jsonl(f"{n}.jsonl", [{"text": f"{n} {'x' * 20} {i}"} for i in range(8)])
             for n in ("a", "b", "c")]
    data = DataSection.model_validate({
        "domain": {"path": paths[:2], "weights": [3, 1]}, "general": {"path": paths[2]},
        "domain_ratio": 0.5, "max_seq_len": 256,
    })
    stream = DataStream(data, tokenizer, seed=1)
    packs = [stream.next_pack() for _ in range(20)]
    tokens = {name: sum(p.tokens_by_source.get(name, 0) for p in packs) for name in stream.counts}
    total = sum(tokens.values())
    shares = {name: count / total for name, count in tokens.items()}
    assert shares == pytest.approx({"domain[0]": 0.375, "domain[1]": 0.125, "general": 0.5}, abs=0.02)
    other = DataStream(data, tokenizer, seed=1)
    other.restore(json.loads(json.dumps(stream.state())))
    assert same(stream.next_pack(), other.next_pack())
    assert stream.steps_for_epochs(1, 256) <= 6
