"""Answers in K3's format: shown as they come, put into the conversation as they are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.rank_file import rank_file, write_k3_tokenizer
from trimtab.data.prompt import build_prompt
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.errors import DataError
from trimtab.evaluate.answer import Reply


@pytest.fixture
def k3(tmp_path: Path) -> Tokenizer:
    write_k3_tokenizer(tmp_path, rank_file([bytes([b]) for b in range(256)]), 256)
    return load_tokenizer(tmp_path)


def test_reasoning_answer_and_calls_are_shown_without_their_markup(k3: Tokenizer) -> None:
    ids = k3.encode(
        "Süß?<|close|>think<|sep|><|open|>response<|sep|>Ja <b>.<|close|>response<|sep|><|open|>"
        'tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" type="number"'
        "<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message"
        "<|sep|>",
        allow_special=True,
    )
    reply = Reply(k3, iter(ids))
    pieces = [piece for piece in reply if piece]
    assert "".join(pieces) == 'Süß?\n\nJa <b>.\n\nf({"n": 5})'
    assert pieces[:5] == ["S", "ü", "ß", "?", "\n\nJ"]
    function = {"name": "f", "arguments": {"n": 5}}
    assert reply.message() == {
        "role": "assistant", "content": "Ja <b>.", "reasoning_content": "Süß?",
        "tool_calls": [{"type": "function", "function": function}],
    }  # fmt: skip


def test_text_that_goes_on_is_kept_as_it_is(k3: Tokenizer) -> None:
    ids = k3.encode("a<|open|>b", allow_special=True)
    reply = Reply(k3, iter(ids), raw=True)
    assert "".join(reply) == "a<|open|>b"
    assert reply.message() == {"role": "assistant", "content": "a<|open|>b"}


def test_a_conversation_that_does_not_fit_the_format_names_its_record(k3: Tokenizer) -> None:
    messages = [{"role": "tool", "content": "x"}]
    with pytest.raises(DataError, match=r"TT404.*data\.jsonl:7.*messages\[0\]"):
        build_prompt(messages, k3, None, where="data.jsonl:7")
