"""Images on their way into a step: rows of joined packs, gradients, a whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.train.image_run import write_shades
from tests.unit.train.test_step import adapted, assert_close, step
from tests.unit.train.tiny_run import recipe_for
from trimtab.config.data import DataSection
from trimtab.data.packing import Pack
from trimtab.data.prompt import load_image_processor
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import DataError
from trimtab.train.adapter_check import check_merge
from trimtab.train.batch import micro_batches
from trimtab.train.loop import finetune
from trimtab.train.plan import BatchPlan
from trimtab.train.reporter import SilentReporter

ANSWERS = ["a", "b", "c", "d", "ab", "cd", "bc", "da", "abc", "dcb"]


class Lines(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def image_packs(directory: Path, checkpoint: Path, count: int) -> list[Pack]:
    path = write_shades(directory / "shades.jsonl", ANSWERS)
    data = DataSection.model_validate({"domain": {"path": str(path)}, "max_seq_len": 64})
    processor = load_image_processor(checkpoint)
    stream = DataStream(data, load_tokenizer(checkpoint), 3, processor=processor)
    return [stream.next_pack() for _ in range(count)]


def test_rows_of_joined_packs_are_those_of_the_placeholders(
    tmp_path: Path, checkpoint: Path
) -> None:
    packs = image_packs(tmp_path, checkpoint, 4)
    batches = list(micro_batches(packs, BatchPlan(256, 128, 64)))
    for batch in batches:
        assert batch.images is not None and batch.images.patches.dtype == torch.float32
        where = (batch.input_ids == 267).nonzero().squeeze(1)
        assert torch.equal(batch.images.rows, where)
        assert len(batch.images.grids) == len(where)
    first = np.concatenate([image.normalised() for image in packs[0].images])
    assert batches[0].images is not None
    assert np.array_equal(batches[0].images.patches[: len(first)].numpy(), first)


def test_the_gradient_does_not_depend_on_the_cut(tmp_path: Path, checkpoint: Path) -> None:
    model, packs = adapted(checkpoint), image_packs(tmp_path, checkpoint, 4)
    whole, gradient = step(model, packs, 256)
    for micro, recompute in ((64, "none"), (128, "layer"), (128, "selective")):
        cut, other = step(model, packs, micro, recompute=recompute)
        assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
        assert_close(gradient, other, 1e-6)  # gradients are float32, the computation float64


def test_text_beside_images_and_packs_without_any(tmp_path: Path, checkpoint: Path) -> None:
    packs = image_packs(tmp_path, checkpoint, 2)
    bare = replace(packs[0], images=(), image_rows=np.zeros(0, np.int64),
                   input_ids=np.where(packs[0].input_ids == 267, 32, packs[0].input_ids))  # fmt: skip
    batches = list(micro_batches([bare, packs[1]], BatchPlan(128, 64, 64)))
    assert batches[0].images is None and batches[1].images is not None
    (joined,) = micro_batches([bare, packs[1]], BatchPlan(128, 128, 64))
    assert joined.images is not None
    assert joined.images.rows.tolist() == (packs[1].image_rows + 64).tolist()


def test_the_loss_depends_on_what_the_images_show(tmp_path: Path, checkpoint: Path) -> None:
    model, packs = adapted(checkpoint, dropout=0.0), image_packs(tmp_path, checkpoint, 1)
    other = replace(packs[0], images=packs[0].images[::-1])
    assert step(model, packs, 64)[0].loss != step(model, [other], 64)[0].loss


def test_pack_and_images_that_disagree_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    packs = image_packs(tmp_path, checkpoint, 1)
    model = adapted(checkpoint)
    for broken in (
        replace(packs[0], images=packs[0].images[1:]),
        replace(packs[0], image_rows=packs[0].image_rows[1:]),
        replace(packs[0], image_rows=packs[0].image_rows + 1),
    ):
        with pytest.raises(DataError, match="TT407"):
            step(model, [broken], 64)


def test_merging_is_checked_with_the_images_of_the_probe(tmp_path: Path, checkpoint: Path) -> None:
    model = adapted(checkpoint)
    (probe,) = micro_batches(image_packs(tmp_path, checkpoint, 1), BatchPlan(64, 64, 64))
    assert check_merge(model, probe)[0].passed


def test_a_run_on_images_learns_and_resumes(tmp_path: Path, checkpoint: Path) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.data.general=null",
                        "finetune.data.domain_ratio=1", "finetune.data.general_ratio=0")  # fmt: skip
    write_shades(tmp_path / "domain.jsonl", ANSWERS)
    lines, metrics = Lines(), tmp_path / "run" / "metrics.jsonl"
    result = finetune(recipe, lines)
    assert result.passed and result.last_loss is not None and result.first_loss is not None
    assert result.last_loss < result.first_loss
    said = "\n".join(lines.said)
    assert "18 images in 10 of 10 records, 1 to 1 tokens each" in said
    assert "embeddings of token 267" in said
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    longer = recipe.model_copy(
        update={"finetune": recipe.finetune.model_copy(update={"steps": 8})}
    )
    assert finetune(longer, SilentReporter()).resumed_from == 6
    again = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert again[:6] == losses and len(again) == 8


def test_a_broken_image_stops_the_run_before_anything_is_written(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe = recipe_for(tmp_path, checkpoint)
    with (tmp_path / "domain.jsonl").open("a") as file:
        part = {"type": "image", "image": "gone.png"}
        file.write(json.dumps({"prompt": [part], "completion": "x"}) + "\n")
    with pytest.raises(DataError, match=r"domain\.jsonl:49: prompt\[0\].*no such file"):
        finetune(recipe, SilentReporter())
    assert not (tmp_path / "run").exists()
