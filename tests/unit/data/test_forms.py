"""Records of other tools, data sets saved to disk, and which answers are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.config.data import Form
from trimtab.data.encode import encode_record
from trimtab.data.forms import detect_form
from trimtab.data.image_source import SOURCE
from trimtab.data.records import Record, open_records, read_records
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError

SHAREGPT = {
    "system": "be brief",
    "conversations": [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "four"},
    ],
    "tools": '[{"type": "function", "function": {"name": "add"}}]',
}
ALPACA = {"instruction": "Translate.", "input": "Haus", "output": "house", "text": "### Instruction...",
          "history": [["hi", "hello"]]}  # fmt: skip


def records(path: Path, rows: list[dict[str, Any]], form: Form | None = None) -> list[Record]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = open_records(path, form)
    return [file.record(index) for index in range(len(file))]


def said(record: Record) -> list[tuple[object, object]]:
    return [(m["role"], m["content"]) for m in record.messages]


def test_sharegpt_turns_become_messages_with_tools_and_calls(tmp_path: Path) -> None:
    (record,) = records(tmp_path / "a.jsonl", [SHAREGPT])
    assert said(record) == [("system", "be brief"), ("user", "2+2?"), ("assistant", None),
                            ("tool", "4"), ("assistant", "four")]
    (call,) = record.messages[2]["tool_calls"]  # type: ignore[misc]
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert record.tools is not None and record.tools[0]["function"] == {"name": "add"}
    assert open_records(tmp_path / "a.jsonl").form == "sharegpt"


def test_alpaca_joins_instruction_and_input_behind_the_history(tmp_path: Path) -> None:
    (record,) = records(tmp_path / "a.jsonl", [ALPACA])
    assert said(record) == [("user", "hi"), ("assistant", "hello"),
                            ("user", "Translate.\nHaus"), ("assistant", "house")]
    assert open_records(tmp_path / "a.jsonl").form == "alpaca"


def test_images_stand_where_their_marks_are(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "left <image> right"},
                             {"from": "gpt", "value": "a cat"}], "images": ["cat.png"]}  # fmt: skip
    (record,) = records(tmp_path / "a.jsonl", [row])
    content = record.messages[0]["content"]
    assert isinstance(content, list) and [p["type"] for p in content] == ["text", "image", "text"]
    assert content[1][SOURCE].path == "cat.png"
    with pytest.raises(DataError, match="TT407"):
        records(tmp_path / "b.jsonl", [row | {"images": ["cat.png", "dog.png"]}])


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        ({"conversations": [{"from": "bot", "value": "x"}]}, None, r"conversations\[0\]\.from"),
        ({"conversations": [{"from": "gpt"}]}, None, "from and value"),
        ({"instruction": 1, "output": "x"}, None, "instruction"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, None, "history"),
        ({"text": "a"}, "alpaca", "form alpaca needs"),
        ({"text": "a"}, "messages", "has no `messages`"),
        ({"messages": []}, "sharegpt", "form sharegpt needs"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, None, "not valid JSON"),
    ],
)
def test_what_is_wrong_is_named_by_line(
    tmp_path: Path, row: dict[str, Any], form: Form | None, said: str
) -> None:
    with pytest.raises(DataError, match=rf"TT401.*a\.jsonl:1.*{said}"):
        records(tmp_path / "a.jsonl", [row], form)


def test_the_first_record_decides_for_the_file_and_the_recipe_over_it(tmp_path: Path) -> None:
    both = {"messages": [{"role": "assistant", "content": "m"}], "text": "t"}
    path = tmp_path / "a.jsonl"
    with pytest.raises(DataError, match="exactly one"):
        records(path, [both])
    assert records(path, [both], "text")[0].text == "t"
    assert said(records(path, [both], "messages")[0]) == [("assistant", "m")]
    path.write_text(json.dumps(ALPACA) + "\n" + json.dumps({"text": "t"}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2.*alpaca"):
        list(read_records(path))
    assert [detect_form(v) for v in (SHAREGPT, ALPACA, {"prompt": ""}, {"text": ""}, [], {})] == [
        "sharegpt", "alpaca", "prompt", "text", "messages", "messages",
    ]


def test_only_the_last_answer_is_trained_on_where_the_recipe_says_so(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first"},
                        {"role": "user", "content": "two"}, {"role": "assistant", "content": "second"}]}  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    whole = encode_record(open_records(path).record(0), tokenizer)
    last = encode_record(open_records(path, last_only=True).record(0), tokenizer)
    assert whole.token_ids.tolist() == last.token_ids.tolist()

    def trained(item):  # type: ignore[no-untyped-def]
        return tokenizer.decode([t for t, m in zip(item.token_ids, item.loss_mask, strict=True) if m])

    assert "first" in trained(whole) and "second" in trained(whole)
    assert "first" not in trained(last) and trained(last).startswith("second")
    assert trained(whole).endswith(trained(last))
    assert (whole.num_bytes, last.num_bytes) == (11, 6)


def test_a_data_set_saved_to_disk_reads_like_its_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = [{"instruction": f"say {n}", "input": "", "output": str(n)} for n in range(5)]
    lines = records(tmp_path / "a.jsonl", rows)
    saved = tmp_path / "saved"
    saved.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:3], rows[3:]), strict=True):
        table = arrow.Table.from_pylist(part)
        with arrow.OSFile(str(saved / name), "wb") as out, arrow.ipc.new_stream(out, table.schema) as to:
            to.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    file = open_records(saved)
    assert len(file) == 5 and file.form == "alpaca"
    assert [said(file.record(n)) for n in range(5)] == [said(line) for line in lines]
    assert file.record(3).where == f"{saved}:4"

    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../a.jsonl"}]}))
    with pytest.raises(DataError, match=r"TT401.*outside"):
        open_records(saved)
    (saved / "state.json").unlink()
    with pytest.raises(DataError, match=r"TT401.*state\.json"):
        open_records(saved)
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits: train, test"):
        open_records(saved)
