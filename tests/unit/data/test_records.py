"""JSONL files: what is a record, and that a bad one is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.data.records import JsonlFile, read_records
from trimtab.errors import DataError


def test_the_three_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "caf\\u00e9"}\n'
        "\n"
        '{"prompt": "p", "completion": "c", "id": 7}\r\n'
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
    )
    records = list(read_records(path))
    assert [r.where for r in records] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert records[0].text == "caf\u00e9"
    assert records[1].messages[1] == {"role": "assistant", "content": "c"}
    assert records[2].prompt_and_answer() == (records[2].messages[:1], "a")
    assert JsonlFile(path).record(1) == records[1]
    with pytest.raises(DataError, match="TT401"):
        records[0].prompt_and_answer()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"txt": "a"}', "txt"),
        ('{"text": "a", "messages": []}', "exactly one"),
        ('{"text": ""}', "not empty"),
        ('{"text": 3}', "text"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"prompt": "a"}', "completion"),
        ('{"messages": []}', "not empty"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "no assistant"),
        ('{"messages": [{"role": "bot", "content": "q"}]}', r"messages\[0\].role"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content"),
        ('{"prompt": "a", "completion": "b", "tools": 1}', "tools"),
    ],
)
def test_bad_line_is_named_by_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=said) as caught:
        list(read_records(path))
    assert caught.value.code == "TT401"
    assert caught.value.where.startswith(f"{path}:3")


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match="2: not UTF-8"):
        list(read_records(path))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_file_without_records_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="TT402"):
        JsonlFile(path)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="TT107"):
        JsonlFile(tmp_path / "gone.jsonl")
