"""`trimtab data preview` shows what enters the loss, and totals that add up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trimtab
from tests.unit.data.pictures import encoded, file_bytes, image_record, picture
from trimtab.arch.presets import preset_config
from trimtab.cli.data import app
from trimtab.errors import DataError

BASE = Path(trimtab.__file__).parent / "demo" / "base"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "[red]q", "completion": "a"}\n' * 5)
    (tmp_path / "g.jsonl").write_text('{"text": "some words"}\n' * 4)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {BASE}}}\n"
        "finetune: {data: {domain: {path: d.jsonl}, general: {path: g.jsonl}}}\n"
        "output: runs/x\n"
    )
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["preview", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_page_marks_what_enters_the_loss(recipe: Path) -> None:
    page = run(str(recipe), "--n", "1")
    assert "<|user|>[red]q<|end_of_msg|><|assistant|>\u00aba<|end_of_msg|>\u00bb" in page
    assert "\u00absome words<|eos|>\u00bb" in page
    assert "next: trimtab finetune" in page


def test_json_is_one_object_with_totals(recipe: Path) -> None:
    shown = json.loads(run(str(recipe), "--json", "--n", "2"))
    assert [item["where"] for item in shown["records"]["domain"]] == ["d.jsonl:1", "d.jsonl:2"]
    domain = shown["sources"]["domain"]
    assert (domain["records"], domain["looked_at"], domain["tokens"]) == (5, 5, 5 * 11)
    assert domain["supervised"] == 10
    assert shown["packs"]["filled"] > 0.9


def test_nothing_is_written(recipe: Path) -> None:
    run(str(recipe))
    assert not (recipe.parent / "runs").exists()


def test_broken_line_is_named(recipe: Path) -> None:
    with (recipe.parent / "d.jsonl").open("a") as file:
        file.write('{"prompt": "x"\n')
    with pytest.raises(DataError, match=r"d\.jsonl:6"):
        run(str(recipe))
    page = run(str(recipe), "--n", "9", "--set", "finetune.data.on_error=skip")
    assert re.search(r"^  d\.jsonl:6: not valid JSON", page, re.MULTILINE)


@pytest.fixture
def image_recipe(recipe: Path) -> Path:
    """The same recipe over a model with vision, with image records."""
    folder = recipe.parent
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_bytes((BASE / name).read_bytes())
    (model / "config.json").write_text(json.dumps(preset_config("k3.1-tiny")))
    (folder / "wide.png").write_bytes(file_bytes(picture(150, 61)))
    records = [
        image_record("<b>read:", "73", encoded(56, 28)),
        image_record("both", "y", "wide.png", encoded(28, 28)),
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records * 3))
    text = recipe.read_text().replace(str(BASE), str(model))
    recipe.write_text(text)
    return recipe


def test_an_image_is_one_box_with_its_tokens(image_recipe: Path) -> None:
    page = " ".join(run(str(image_recipe), "--n", "2").split())
    assert "image 56x28<|media_content|>[image 56x28: 1x2 = 2 tokens]<|media_end|>" in page
    assert "[image 150x61: 3x6 = 18 tokens]" in page and "[image 28x28: 1x1 = 1 token]" in page
    assert "domain: 9 images of 1 to 18 tokens, 7.0 on average" in page


def test_json_has_boxes_and_image_totals(image_recipe: Path) -> None:
    shown = json.loads(run(str(image_recipe), "--json", "--n", "1"))
    runs = shown["records"]["domain"][0]["runs"]
    (box,) = [item for item in runs if item["role"] == "image"]
    assert (box["num_tokens"], box["supervised"]) == (2, False)
    assert box["image"] == {"width": 56, "height": 28, "rows": 1, "columns": 2, "picture": ""}
    assert shown["sources"]["domain"]["image_sizes"] == {"1": 3, "2": 3, "18": 3}
    assert sum(item["num_tokens"] for item in runs) > 2
    assert shown["packs"]["images"] > 0


def test_the_page_shows_pictures_and_loads_nothing(image_recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "pages" / "p.html"
    run(str(image_recipe), "--n", "2", "--html", str(file))
    page = file.read_text()
    assert page.count('<img src="data:image/png;base64,') == 3
    assert "3x6 = <b>18 tokens</b>" in page and "&lt;b&gt;read:" in page and "<b>read:" not in page
    assert 'class="assistant loss" title="assistant, 2 tokens, in the loss">73<' in page
    assert "number of images by tokens they take" in page
    outside = re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*|url\((?!["']?data:)|@import""", page)
    assert outside == []


def test_many_sizes_share_bars(image_recipe: Path, tmp_path: Path) -> None:
    records = [image_record("q", "y", encoded(28 * n, 28)) for n in range(1, 30)]
    (image_recipe.parent / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run(str(image_recipe), "--html", str(tmp_path / "p.html"))
    page = (tmp_path / "p.html").read_text()
    assert ">1 to 3<" in page and ">28 to 30<" in page


def test_a_page_without_images_has_no_image_part(recipe: Path, tmp_path: Path) -> None:
    run(str(recipe), "--html", str(tmp_path / "p.html"))
    page = (tmp_path / "p.html").read_text()
    assert "Tokens per image" not in page and "some words" in page


def test_a_broken_image_is_named(image_recipe: Path) -> None:
    (image_recipe.parent / "wide.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"d\.jsonl:2: messages\[0\].*not an image file"):
        run(str(image_recipe))
    skipping = "finetune.data.on_error=skip"
    shown = json.loads(run(str(image_recipe), "--json", "--n", "1", "--set", skipping))
    assert shown["sources"]["domain"]["unreadable"] == 3
