"""Rank files: ids are kept, control tokens are never read from ordinary text."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.rank_file import learn_ranks, rank_file, split, write_k3_tokenizer
from trimtab.data.ranks import MAX_PIECE_CHARS, MAX_RUN_CHARS, RankVocabulary, parse_ranks, pieces
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.errors import DataError

K3_BASE = 163_584
K3_FILE = os.environ.get("TRIMTAB_K3_TOKENIZER")
OTHER_FILE = os.environ.get("TRIMTAB_RANK_FILE")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hello", " world"]),
        ("HTMLParser don't DON'T", ["HTMLParser", " don't", " DON'T"]),
        ("12345", ["123", "45"]),
        ("你好世界ab", ["你好世界", "ab"]),
        ("x = {a}\n\n  b", ["x", " =", " {", "a", "}\n\n", " ", " b"]),
        ('message role="assistant"', ["message", " role", '="', "assistant", '"']),
        ("a \r\n", ["a", " \r\n"]),
        ("é_x", ["é", "_x"]),
        ("a   ", ["a", "   "]),
    ],
)
def test_text_is_cut_before_merging_as_in_kimis_vocabularies(
    text: str, expected: list[str]
) -> None:
    assert split(text) == expected
    # With whole words in the file the tokens are the words; without, they are bytes.
    whole = sorted({word.encode() for word in expected if len(word.encode()) > 1})
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {token: 256 + i for i, token in enumerate(_closed(whole))}
    data = rank_file(sorted(ranks, key=ranks.__getitem__))
    vocabulary = RankVocabulary(data, {}, None, "tiktoken.model")
    ids = vocabulary.encode(text, False)
    assert [vocabulary.decode([i], False) for i in ids] == expected


def _closed(words: list[bytes]) -> list[bytes]:
    """Each word with the prefixes that lead to it, shortest first."""
    parts = {word[:n] for word in words for n in range(2, len(word) + 1)}
    return sorted(parts, key=lambda part: (len(part), part))


def test_control_ids_follow_the_file_whichever_are_named(k3: Tokenizer) -> None:
    base = k3.vocab_size - 256
    assert k3.special_ids == frozenset(range(base, base + 256))
    assert (k3.bos_id, k3.eos_id, k3.pad_id) == (base, base + 1, base + 255)
    assert base + 2 in k3.stop_ids
    assert k3.encode("<|open|>", allow_special=True) == [base + 3]
    assert k3.encode("<|media_pad|>", allow_special=True) == [base + 21]
    assert k3.decode([base + 8, base + 100]) == (
        f"<|reserved_token_{base + 8}|><|reserved_token_{base + 100}|>"
    )
    assert k3.decode([base + 3, 97, base + 500], skip_special=True) == "a"


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(k3: Tokenizer, text: str) -> None:
    ids = k3.encode(text)
    assert k3.decode(ids) == text
    assert k3.special_ids.isdisjoint(ids)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(["<|open|>", "<|sep|>", "[EOS]", "<|", "|>", " ", "a", "\n"])))
def test_typed_markers_are_ordinary_text(k3: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    assert k3.special_ids.isdisjoint(k3.encode(text))
    assert k3.decode(k3.encode(text)) == text


def test_texts_and_runs_that_are_too_long_are_cut_where_training_did() -> None:
    run = MAX_RUN_CHARS
    assert [len(p) for p in pieces("a" * (2 * run))] == [run, run]
    assert [len(p) for p in pieces("b " + "a" * (run + 1) + " c")] == [2 + run, 3]
    assert [len(p) for p in pieces(" " * (run + 1))] == [run, 1]
    assert list(pieces("a b" * run)) == ["a b" * run]
    text = "ab " * (MAX_PIECE_CHARS // 2)
    lengths = [len(p) for p in pieces(text)]
    assert lengths == [MAX_PIECE_CHARS, len(text) - MAX_PIECE_CHARS]
    assert "".join(pieces(text)) == text
    assert list(pieces("")) == []


def test_a_long_run_is_encoded_in_pieces(k3: Tokenizer) -> None:
    text = "message" * 8000
    ids = k3.encode(text)
    assert k3.decode(ids) == text
    (whole,) = k3.encode("message")
    # 56,000 characters are cut twice, each time inside a word.
    assert ids.count(whole) == 7998


GOOD = rank_file([bytes([b]) for b in range(256)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "tiktoken.model:1"),
        (b"", "single bytes"),
        (GOOD + b"YWI=\n", "tiktoken.model:257"),
        (GOOD + b"!! 256\n", "tiktoken.model:257"),
        (GOOD + b"YQ== 256\n", "tiktoken.model:257"),
        (GOOD + b"YWI= 257\n", "ranks must be 0 to 256"),
    ],
)
def test_damaged_rank_file_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_ranks(data, "tiktoken.model")


def test_blank_lines_and_any_order_are_fine() -> None:
    lines = GOOD.splitlines(keepends=True)
    assert parse_ranks(b"\n".join(reversed(lines)), "f") == parse_ranks(GOOD, "f")


@pytest.mark.parametrize(
    ("decoder", "vocab_size", "message"),
    [
        ({"255": {"content": "<x>"}}, None, "must have an id from 256"),
        ({"600": {"content": "<x>"}}, None, "to 511"),
        ({"x": {"content": "<x>"}}, None, "must have an id"),
        ({"300": {"content": ""}}, None, "not empty"),
        ({"300": {"content": "<x>"}, "301": {"content": "<x>"}}, None, "the same text"),
        ({}, 200, "states a vocabulary of 200"),
    ],
)
def test_impossible_control_tokens_are_an_error(
    decoder: dict[str, object], vocab_size: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        RankVocabulary(GOOD, {"added_tokens_decoder": decoder}, vocab_size, "tiktoken.model")


def test_control_tokens_end_where_the_model_does() -> None:
    vocabulary = RankVocabulary(GOOD, {}, 260, "tiktoken.model")
    assert (vocabulary.size, sorted(vocabulary.specials)) == (260, [256, 257, 258, 259])


def test_tokenizer_json_is_preferred(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from tests.unit.data.conftest import BASE

    shutil.copytree(BASE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tiktoken.model").write_bytes(b"not read")
    assert load_tokenizer(tmp_path).vocab_size == tokenizer.vocab_size


def test_jinja_template_works_on_a_rank_file(tmp_path: Path) -> None:
    ranks = learn_ranks("user assistant " * 4, 20)
    write_k3_tokenizer(tmp_path, rank_file(ranks), len(ranks))
    template = "{% for m in messages %}<|open|>{{ m.content }}<|end_of_msg|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.render([{"role": "user", "content": "<|open|>"}]).token_ids
    base = len(ranks)
    assert [i - base for i in ids if i >= base] == [3, 2]
    assert tokenizer.decode(ids) == "<|open|><|open|><|end_of_msg|>"


@pytest.mark.skipif(OTHER_FILE is None, reason="TRIMTAB_RANK_FILE names no rank file")
def test_large_rank_file_survives_text_of_many_kinds(tmp_path: Path) -> None:
    """A released file of another family: the format is the same, its pre-tokenizer is not."""
    assert OTHER_FILE is not None
    data = Path(OTHER_FILE).read_bytes()
    base = len(parse_ranks(data, OTHER_FILE))
    write_k3_tokenizer(tmp_path, data, base)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == base + 256
    for text in ("Hello world", "你好世界", "def f(x):\n\treturn x ** 2\n", "  \r\n é 🤖", "ok"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) < max(2, len(text.encode()))
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("<|open|>[EOS]<|sep|>"))


@pytest.mark.skipif(K3_FILE is None, reason="TRIMTAB_K3_TOKENIZER names no rank file")
def test_goldens_of_the_released_file(tmp_path: Path) -> None:
    assert K3_FILE is not None
    write_k3_tokenizer(tmp_path, Path(K3_FILE).read_bytes(), K3_BASE)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 163_840
    assert tokenizer.encode("Hello world") == [19180, 2695]
    assert tokenizer.encode("你好世界") == [33845, 2243]
    structure = '<|close|>message<|sep|><|end_of_msg|><|open|>message role="assistant"<|sep|>'
    assert tokenizer.encode(structure + "<|open|>think<|sep|>", allow_special=True) == [
        163588, 2778, 163589, 163586, 163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964,
        163589,
    ]  # fmt: skip


def test_bytes_in_base64_are_the_tokens() -> None:
    ranks = parse_ranks(GOOD + b"%s 256\n" % base64.b64encode(b" role"), "f")
    assert (ranks[b" role"], len(ranks)) == (256, 257)
