"""Dumps hold every state under fixed names, and comparison names what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint.tiny import make
from trimtab.errors import DataError, TrimtabError
from trimtab.verify.dump import (
    DUMP_FILE,
    check_token_ids,
    compare_dumps,
    read_sequences,
    write_dump,
)

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
