"""The base's own answers as records: continued where it broke off, and what the base says is likely."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.train.image_run import write_shades
from trimtab.cli.data import app
from trimtab.data.encode import encode_record
from trimtab.data.records import open_records
from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import DataError
from trimtab.evaluate import replay as module
from trimtab.evaluate.replay import Replayed, ReplayOptions, replay
from trimtab.train.reporter import SilentReporter

BASE = str(files("trimtab.demo") / "base")
ROWS = [
    {"prompt": "copy: hello"},
    {"messages": [{"role": "user", "content": "copy: tree"}, {"role": "assistant", "content": "no"}]},
    {"conversations": [{"from": "human", "value": "copy: house"}]},
    {"instruction": "copy", "input": "milling"},
]
OPTIONS = ReplayOptions(max_new_tokens=24, batch_tokens=80)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(prompts: Path, out: Path, options: ReplayOptions = OPTIONS) -> Replayed:
    return replay(BASE, prompts, out, options, SilentReporter())


def test_answers_of_the_base_are_records_that_can_be_trained_on(tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", ROWS), tmp_path / "new" / "general.jsonl"
    done = run(prompts, out)
    assert (done.prompts, done.records, done.before, done.cut) == (4, 4, 0, 0)
    file, tokenizer = open_records(out), load_tokenizer(BASE)
    found = [file.record(n) for n in range(4)]
    assert [record.messages[-1]["content"] for record in found] == ["hello", "tree", "house", "milling"]
    assert all(encode_record(record, tokenizer).num_supervised for record in found)


@pytest.mark.parametrize("torn", [b"", b'{"messages": [{"ro'])
def test_a_broken_off_file_is_continued(
    tmp_path: Path, torn: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, whole, out = write(tmp_path / "p.jsonl", ROWS), tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run(prompts, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + torn)
    asked: list[int] = []
    answers = module._answers

    def counted(*arguments: object) -> object:
        asked.append(len(arguments[2]))  # type: ignore[arg-type]
        return answers(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_answers", counted)
    done = run(prompts, out)
    assert (done.records, done.before, sum(asked)) == (4, 2, 2)
    assert out.read_bytes() == whole.read_bytes()
    run(prompts, out)
    assert sum(asked) == 2


def test_answers_without_an_end_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "copy: a"}, {"prompt": "copy: a very long text that takes many tokens"}]
    out = tmp_path / "b.jsonl"
    done = run(write(tmp_path / "p.jsonl", rows), out, ReplayOptions(max_new_tokens=6))
    assert (done.records, done.cut) == (1, 1)
    assert [json.loads(line)["replay"]["prompt"] for line in out.read_text().splitlines()] == [0]


def test_a_file_of_other_answers_is_refused(tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", ROWS[:1]), tmp_path / "b.jsonl"
    run(prompts, out)
    with pytest.raises(DataError, match=r"TT408.*b\.jsonl:1"):
        run(write(tmp_path / "q.jsonl", [{"prompt": "copy: x"}]), out)
    with pytest.raises(DataError, match="TT408"):
        run(prompts, out, ReplayOptions(max_new_tokens=25))
    with pytest.raises(DataError, match=r"TT408.*is the file of the prompts"):
        run(prompts, prompts)


@pytest.mark.parametrize("row", [{"text": "only text"}, {"messages": []},
                                 {"messages": [{"role": "assistant", "content": "a"}]}])
def test_a_line_that_asks_nothing_is_named(tmp_path: Path, row: dict[str, object]) -> None:
    prompts = write(tmp_path / "p.jsonl", [ROWS[0], row])
    with pytest.raises(DataError, match=r"TT401.*p\.jsonl:2"):
        run(prompts, tmp_path / "b.jsonl")


def test_images_go_along_but_paths_need_the_same_directory(tmp_path: Path) -> None:
    prompts = write_shades(tmp_path / "p.jsonl", ["a"])
    out = tmp_path / "elsewhere" / "b.jsonl"
    assert run(prompts, out, ReplayOptions(max_new_tokens=40)).prompts == 1
    (tmp_path / "x.png").write_bytes(b"not looked at")
    part = {"type": "image", "path": "x.png"}
    rows = [{"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}]
    with pytest.raises(DataError, match=r"TT408.*must lie beside"):
        run(write(tmp_path / "q.jsonl", rows), out.with_name("c.jsonl"))


def test_the_verb_says_what_it_did(tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", ROWS[:2]), tmp_path / "b.jsonl"
    command = ["replay", BASE, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "24"]
    shown = CliRunner().invoke(app, [*command, "--limit", "1", "--json"], catch_exceptions=False)
    assert json.loads(shown.stdout) == {
        "path": str(out), "prompts": 1, "records": 1, "before": 0, "cut": 0,
    }
    text = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    assert "2 answers to 2 prompts\n1 of them were there already" in text
