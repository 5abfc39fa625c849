"""The file of batches, and that a curve is plain AdamW on the mean over all predicted tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.tiny import linear_config, make
from trimtab.checkpoint.adapter import AdapterMeta, attach_adapter, load_adapter, save_adapter
from trimtab.checkpoint.load import load_model
from trimtab.errors import CheckpointError, DataError
from trimtab.models.lora import lora_modules, lora_parameters
from trimtab.verify.curve import adamw_steps, batch_loss, loss_curve, read_batches
from trimtab.verify.logits import sequence_logits


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "TT401"), ('{"sequences": []}', "TT401"), ('{"batches": []}', "TT402"),
     ('{"batches": [[[1, 2], [3]]]}', "TT402"), ('{"batches": [[]]}', "TT402"),
     ('{"batches": [[[1, true]]]}', "TT401"), ('{"batches": [[1, 2]]}', "TT401")],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(DataError, match=code):
        read_batches(tmp_path / "b.json")


def test_a_curve_is_torch_adamw_on_the_mean_over_predicted_tokens(tmp_path: Path) -> None:
    arch = make(tmp_path / "m", linear_config())
    targets = targets_of(arch, ("q_proj", "o_proj"))
    tensors = random_tensors(targets)
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta(str(tmp_path / "m")))
    batches = [[[1, 2, 3, 4], [5, 6]], [[7, 8, 9]]]
    (tmp_path / "b.json").write_text(json.dumps({"batches": batches}))
    losses = loss_curve(tmp_path / "m", tmp_path / "a", read_batches(tmp_path / "b.json"),
                        tmp_path / "out", lr=0.01)
    assert json.loads((tmp_path / "out/losses.json").read_text()) == {"loss": losses}

    model, _ = load_model(tmp_path / "m", base_dtype="fp32")
    attach_adapter(model, load_adapter(tmp_path / "a", arch))
    nats = sum(
        float(torch.nn.functional.cross_entropy(
            sequence_logits(model, ids)[:-1], torch.tensor(ids[1:]), reduction="sum"))
        for ids in batches[0]
    )
    assert losses[0] == pytest.approx(nats / 4, rel=1e-5)  # 3 + 1 predicted tokens
    # The first AdamW step moves each element by lr, whatever the size of its gradient.
    name = f"{targets[0].fqn}.lora.B"
    parameter = lora_parameters(model)[name]
    before = parameter.detach().clone()
    batch_loss(model, batches[0]).backward()
    assert parameter.grad is not None and bool(parameter.grad.abs().max() > 1e-6)
    list(adamw_steps(model, list(lora_parameters(model).values()), batches[:1], 0.01))
    moved = (parameter.detach() - before)[parameter.grad.abs() > 1e-5]
    assert torch.allclose(moved.abs(), torch.full_like(moved, 0.01), rtol=1e-2)
    trained = load_adapter(tmp_path / "out/adapter", arch).tensors[name]
    assert not torch.equal(trained, before)
    assert lora_modules(model).keys() == {t.fqn for t in targets}


def test_a_full_output_directory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/other.txt").write_text("x")
    with pytest.raises(CheckpointError, match="TT309"):
        loss_curve(tmp_path / "none", tmp_path / "none", [[[1, 2]]], tmp_path / "out")
