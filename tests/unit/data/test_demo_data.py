"""The packaged data sets: as the manifest says, usable as they are, nothing held out is trained on."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

import pytest
from PIL import Image

import trimtab
from trimtab.data.encode import encode_record
from trimtab.data.records import read_records
from trimtab.data.tokenizer import Tokenizer

DATA = Path(trimtab.__file__).parent / "demo" / "data"


def pairs(name: str) -> list[tuple[str, str]]:
    found = []
    for record in read_records(DATA / name):
        prompt, answer = record.prompt_and_answer()
        found.append((str(prompt[0]["content"]).removeprefix("lemma: "), answer))
    return found


def test_files_are_those_of_the_manifest() -> None:
    files = json.loads((DATA / "manifest.json").read_text())["files"]
    assert set(files) == {path.name for path in DATA.glob("*.jsonl")}
    for name, entry in files.items():
        data = (DATA / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], name
        assert (len(data), data.count(b"\n")) == (entry["bytes"], entry["records"])


def test_no_form_of_a_held_out_word_is_trained_on() -> None:
    train, held_out = pairs("domain_train.jsonl"), pairs("domain_heldout.jsonl")
    assert (len(train), len(held_out)) == (12_000, 500)
    assert not {t for p in train for t in p} & {t for p in held_out for t in p}
    words = [word for word, _ in train + held_out]
    assert len(set(words)) == len(words)
    assert all(word != lemma for word, lemma in train + held_out)


def test_general_texts_are_apart_and_fit_a_pack(tokenizer: Tokenizer) -> None:
    train = {record.text for record in read_records(DATA / "general_train.jsonl")}
    held_out = list(read_records(DATA / "general_heldout.jsonl"))
    assert not train & {record.text for record in held_out}
    assert max(len(encode_record(record, tokenizer)) for record in held_out) <= 1024


def digits(name: str) -> list[tuple[list[bytes], str]]:
    """Pixels of the digits of each image, and the answer."""
    found = []
    for line in (DATA / name).read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        with Image.open(io.BytesIO(base64.b64decode(user["content"][0]["image"]))) as image:
            assert image.height == 28 and image.width % 28 == 0
            cut = [image.crop((x, 0, x + 28, 28)).tobytes() for x in range(0, image.width, 28)]
        found.append((cut, assistant["content"]))
    return found


@pytest.mark.parametrize(("name", "count"), [("name", 450), ("read", 750)])
def test_no_held_out_digit_is_trained_on(name: str, count: int) -> None:
    train = digits("digits_train.jsonl") + digits("digits_rehearsal.jsonl")
    held_out = digits(f"digits_{name}_heldout.jsonl")
    seen = [digit for cut, _ in held_out for digit in cut]
    assert len(held_out) == 300 and len(set(seen)) == len(seen) == count
    assert not set(seen) & {digit for cut, _ in train for digit in cut}


def test_names_are_the_words_of_the_digits_that_are_read() -> None:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    named, read = digits("digits_name_heldout.jsonl"), digits("digits_read_heldout.jsonl")
    label = {d: words[int(n)] for cut, number in read for d, n in zip(cut, number, strict=True)}
    for cut, name in named:
        assert 1 <= len(cut) <= 2
        assert name == " ".join(label[digit] for digit in cut)
    labels = "".join(number for _, number in read)
    assert min(labels.count(n) for n in "0123456789") > 40
