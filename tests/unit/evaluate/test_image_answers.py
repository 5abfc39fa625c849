"""Questions about images: batched like text, scored like text, and shown in reports."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.unit.train.image_run import LEVELS, shade, write_shades
from tests.unit.train.tiny_run import recipe_for
from trimtab.checkpoint.load import load_model
from trimtab.cli.main import run
from trimtab.data.prompt import load_image_processor
from trimtab.data.records import read_records
from trimtab.data.tokenizer import load_tokenizer
from trimtab.evaluate.answer import Speaker, user_message
from trimtab.evaluate.run import evaluate
from trimtab.evaluate.tasks import Question, answer_all
from trimtab.train.reporter import SilentReporter

ANSWERS = ["a", "dcb", "b", "cd", "da", "c", "abc", "d"]


def questions(path: Path) -> list[Question]:
    return [Question(*record.prompt_and_answer(), record.where) for record in read_records(path)]


def test_an_answer_does_not_depend_on_its_neighbours(tmp_path: Path, checkpoint: Path) -> None:
    model, _ = load_model(checkpoint, base_dtype="fp64")
    tokenizer, processor = load_tokenizer(checkpoint), load_image_processor(checkpoint)
    asked = questions(write_shades(tmp_path / "q.jsonl", ANSWERS))
    asked.insert(3, Question(({"role": "user", "content": "no image"},), "x"))

    def texts(group: list[Question], batch_tokens: int) -> list[str]:
        found = answer_all(model, tokenizer, group, max_new_tokens=6, batch_tokens=batch_tokens,
                           processor=processor)  # fmt: skip
        return [answer.text for answer in found]

    together = texts(asked, 10_000)
    assert together == texts(asked, 1)
    assert together[:2] == texts(asked[:2], 10_000)


def test_questions_are_shown_with_a_word_for_each_image(tmp_path: Path) -> None:
    asked = questions(write_shades(tmp_path / "q.jsonl", ["a", "dcb"]))
    assert [q.shown for q in asked] == ["[image] ?", "[image] [image] [image] ?"]


def test_answers_are_scored_by_exact_match(tmp_path: Path, checkpoint: Path) -> None:
    path = write_shades(tmp_path / "held_out.jsonl", ["a", "d", "b", "c"])
    model, _ = load_model(checkpoint)
    tokenizer, processor = load_tokenizer(checkpoint), load_image_processor(checkpoint)
    said = answer_all(model, tokenizer, questions(path), max_new_tokens=4, batch_tokens=1000,
                      processor=processor)  # fmt: skip
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, answer in list(zip(rows, said, strict=True))[::2]:
        row["messages"][1]["content"] = answer.text  # two right, two wrong
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_for(tmp_path, checkpoint, f"evaluate.domain=[{{path: {path}, max_new_tokens: 4}}]")
    report = evaluate(recipe, None, SilentReporter())
    assert report.sets[0].before.value == 0.5
    example = json.loads(json.dumps(report.as_dict()))["sets"][0]["examples"][0]
    assert example["prompt"] == "[image] ?"
    assert example["images"][0].startswith("data:image/png;base64,")


def test_a_speaker_sees_the_image_of_a_file(tmp_path: Path, checkpoint: Path) -> None:
    for letter, level in LEVELS.items():
        (tmp_path / f"{letter}.png").write_bytes(base64.b64decode(shade(level)))
    speaker = Speaker.load(str(checkpoint), None, base_dtype="fp32", max_new_tokens=4, raw=False)
    prompt = speaker._prompt([user_message("?", [tmp_path / "a.png", tmp_path / "d.png"])])
    assert len(prompt.images) == 2 and prompt.token_ids.count(267) == 2
    assert "".join(speaker.stream([user_message("?", [tmp_path / "a.png"])])) is not None


def test_generate_takes_images(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(base64.b64decode(shade(200)))
    words = ["generate", str(checkpoint), "--prompt", "?", "--max-new-tokens", "3"]
    assert run([*words, "--image", str(tmp_path / "a.png")]) == 0
    assert run([*words, "--image", str(tmp_path / "gone.png")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert run([*words, "--image", str(tmp_path / "a.png"), "--raw"]) == 2
    (tmp_path / "b.png").write_bytes(b"not one")
    assert run([*words, "--image", str(tmp_path / "b.png")]) == 2
    assert "b.png" in capsys.readouterr().err


def test_a_recipe_names_where_evaluated_images_lie(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(base64.b64decode(shade(0)))
    held_out = tmp_path / "held_out.jsonl"
    prompt = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "?"}]
    held_out.write_text(json.dumps({"prompt": prompt, "completion": "a"}) + "\n")
    recipe = recipe_for(tmp_path, checkpoint, f"evaluate.domain=[{{path: {held_out}}}]",
                        f"finetune.data.image.root={tmp_path}/pictures")  # fmt: skip
    assert evaluate(recipe, None, SilentReporter()).sets[0].num_records == 1
