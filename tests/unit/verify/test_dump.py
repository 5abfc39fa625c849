"""Dumps hold every state under fixed names, and comparison names what differs."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.checkpoint.tiny import make
from trimtab.errors import DataError, TrimtabError
from trimtab.verify.dump import (
    DUMP_FILE,
    check_token_ids,
    compare_dumps,
    read_sequences,
    write_dump,
)
from trimtab.verify.images import images_for

SEQUENCES = [[5, 6, 7, 8, 9, 10], [11], [12, 13]]


def test_names_dtypes_and_losses(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    write_dump(tmp_path / "m", SEQUENCES, tmp_path / "d", "float64")
    tensors = load_file(tmp_path / "d" / DUMP_FILE)
    layers = [str(n) for n in range(arch.num_layers)]
    names = {f"hidden.{n}.{at}" for n in range(3) for at in ("embed", *layers, "final")}
    names |= {f"logits.{n}" for n in range(3)} | {"loss.0", "loss.2"}
    assert set(tensors) == names
    assert {t.dtype for t in tensors.values()} == {torch.float64}
    assert tensors["logits.0"].shape == (6, arch.vocab_size)
    logprob = tensors["logits.0"].log_softmax(-1)
    wanted = -sum(logprob[t, SEQUENCES[0][t + 1]] for t in range(5)) / 5
    assert float(tensors["loss.0"]) == pytest.approx(float(wanted), rel=1e-12)


def test_dtypes_agree_within_their_limits(tmp_path: Path) -> None:
    make(tmp_path / "m")
    write_dump(tmp_path / "m", SEQUENCES, tmp_path / "d64", "float64")
    write_dump(tmp_path / "m", SEQUENCES, tmp_path / "d32", "float32")
    verdicts = compare_dumps(tmp_path / "d32", tmp_path / "d64")
    assert all(v.passed for v in verdicts)
    assert not all(v.passed for v in compare_dumps(tmp_path / "d32", tmp_path / "d64", 1e-12))
    assert load_file(tmp_path / "d32" / DUMP_FILE)["loss.0"].dtype == torch.float64


def test_changed_missing_and_nan_tensors_fail(tmp_path: Path) -> None:
    make(tmp_path / "m")
    for name in ("a", "b"):
        write_dump(tmp_path / "m", SEQUENCES[:1], tmp_path / name)
    tensors = load_file(tmp_path / "a" / DUMP_FILE)
    tensors["logits.0"][2, 3] += 1
    tensors["hidden.0.1"][0, 0] = float("nan")
    tensors["extra"] = tensors.pop("loss.0")
    save_file(tensors, tmp_path / "a" / DUMP_FILE)
    failed = {v.name for v in compare_dumps(tmp_path / "a", tmp_path / "b") if not v.passed}
    assert failed == {"logits.0", "hidden.0.1", "extra", "loss.0"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "TT401"), ("[]", "TT401"), ('{"sequences": 3}', "TT401"),
        ('{"sequences": [[1, "a"]]}', "TT401"), ('{"sequences": [[true]]}', "TT401"),
        ('{"sequences": []}', "TT402"), ('{"sequences": [[1], []]}', "TT402"),
    ],
)
def test_bad_input_files(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_sequences(tmp_path / "ids.json")
    assert caught.value.code == code


def test_token_out_of_range_is_found_before_anything_is_written(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    for bad in (-1, arch.vocab_size):
        with pytest.raises(DataError, match=r"sequences\[1\]\[2\]") as caught:
            write_dump(tmp_path / "m", [[1], [1, 2, bad]], tmp_path / "d")
        assert caught.value.code == "TT403"
        assert not (tmp_path / "d").exists()
    check_token_ids([[0, arch.vocab_size - 1]], arch.vocab_size, "x")


def test_existing_output_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").touch()
    with pytest.raises(TrimtabError, match="TT309"):
        write_dump(tmp_path / "nothing", SEQUENCES, tmp_path / "d")


def test_sequences_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps({"sequences": SEQUENCES}))
    assert read_sequences(tmp_path / "ids.json") == SEQUENCES


def _picture(path: Path, size: tuple[int, int], seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, "PNG")
    return path.read_bytes()


IMAGE_SEQUENCES = [[5, 3, 3, 6, 3, 7], [8, 9]]


def test_images_by_path_by_base64_and_as_patches_give_the_same_dump(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    assert arch.image_token_id == 3
    _picture(tmp_path / "a.png", (30, 20), 1)
    second = base64.b64encode(_picture(tmp_path / "b.png", (28, 28), 2)).decode()
    paths, texts, patches = (tmp_path / n for n in ("p.json", "t.json", "x.safetensors"))
    paths.write_text(json.dumps({"images": [["a.png", str(tmp_path / "b.png")], []]}))
    texts.write_text(json.dumps({"images": [["a.png", second], []]}))
    ids, found = images_for(tmp_path / "m", paths, IMAGE_SEQUENCES, torch.float64)
    assert ids == IMAGE_SEQUENCES and found[1] is None
    assert found[0] is not None and found[0].grids == ((1, 2, 4), (1, 2, 2))
    assert found[0].rows.tolist() == [1, 2, 4] and found[0].patches.dtype is torch.float64
    save_file({"patches.0": found[0].patches, "grids.0": torch.tensor(found[0].grids)}, patches)
    dumps = []
    for n, file in enumerate((paths, texts, patches)):
        ids, batches = images_for(tmp_path / "m", file, IMAGE_SEQUENCES, torch.float64)
        write_dump(tmp_path / "m", ids, tmp_path / f"d{n}", "float64", images=batches)
        dumps.append(load_file(tmp_path / f"d{n}" / DUMP_FILE))
    write_dump(tmp_path / "m", IMAGE_SEQUENCES, tmp_path / "none", "float64")
    plain = load_file(tmp_path / "none" / DUMP_FILE)
    assert dumps[0].keys() == plain.keys()
    assert all(torch.equal(dumps[0][n], d[n]) for d in dumps[1:] for n in plain)
    moved = (dumps[0]["hidden.0.embed"] != plain["hidden.0.embed"]).any(-1)
    assert moved.tolist() == [False, True, True, False, True, False]
    assert torch.equal(dumps[0]["logits.1"], plain["logits.1"])
    logprob = dumps[0]["logits.0"].log_softmax(-1)
    wanted = -(logprob[2, 6] + logprob[4, 7]) / 2  # placeholders are nobody's labels
    assert float(dumps[0]["loss.0"]) == pytest.approx(float(wanted), rel=1e-12)


def test_one_placeholder_per_image_is_repeated(tmp_path: Path) -> None:
    make(tmp_path / "m")
    _picture(tmp_path / "a.png", (60, 28), 1)
    file = tmp_path / "i.json"
    file.write_text(json.dumps({"images": [["a.png"], []]}))
    ids, found = images_for(tmp_path / "m", file, [[5, 3, 6], [8]])
    assert ids == [[5, 3, 3, 3, 6], [8]]
    assert found[0] is not None and found[0].patches.dtype is torch.float32


@pytest.mark.parametrize(
    ("value", "sequences", "code", "words"),
    [
        ({"images": [["a.png"]]}, [[5, 3, 3, 6]], "TT407", "2 placeholders .*need one each, or 3"),
        ({"images": [[]]}, [[5, 3]], "TT407", "1 placeholders"),
        ({"images": [["a.png"], []]}, [[3]], "TT401", "one list for each of 1"),
        ({"images": ["a.png"]}, [[3]], "TT401", "must be"),
        ({"images": [["nothing.png"]]}, [[3]], "TT406", "images\\[0\\]\\[0\\].*no such file"),
        ({"images": [[7]]}, [[3]], "TT401", "images\\[0\\]\\[0\\]"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    tmp_path: Path, value: object, sequences: list[list[int]], code: str, words: str
) -> None:
    make(tmp_path / "m")
    _picture(tmp_path / "a.png", (60, 28), 1)
    (tmp_path / "i.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=words) as caught:
        images_for(tmp_path / "m", tmp_path / "i.json", sequences)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "tensors",
    [
        {"patches.0": torch.zeros(4, 3, 14, 14)},
        {"patches.7": torch.zeros(4, 3, 14, 14), "grids.7": torch.tensor([[1, 2, 2]])},
        {"patches.0": torch.zeros(4, 3, 14, 14), "grids.0": torch.tensor([1, 2, 2])},
    ],
)
def test_patches_of_another_form_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    make(tmp_path / "m")
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(DataError, match="TT401"):
        images_for(tmp_path / "m", tmp_path / "x.safetensors", [[3]])
