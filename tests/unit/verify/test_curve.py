"""The file of batches, and that a curve is plain AdamW on the mean over all predicted tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.tiny import linear_config, make
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.checkpoint.adapter import AdapterMeta, attach_adapter, load_adapter, save_adapter
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import MANIFEST_NAME
from trimtab.checkpoint.source import open_source
from trimtab.errors import AdapterError, CheckpointError, DataError, RunError
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


def write_adapter(folder: Path, base: Path, *, experts: bool = False) -> Path:
    arch = load_arch(open_source(base).config(), "m")
    targets = resolve_targets(arch, target_modules=["q_proj"], rank=4, alpha=8,
                              experts="per_expert" if experts else "none")
    meta = AdapterMeta(str(base), open_source(base).fingerprint(), expert_form="per_expert")
    draw = torch.Generator().manual_seed(0)
    tensors = {f"{t.fqn}.lora.{s}": torch.randn(t.shape(s), generator=draw) for t in targets for s in "AB"}
    save_adapter(folder, arch, targets, tensors, meta)
    return folder


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    arch = make(tmp_path / "m", linear_config())
    adapter = write_adapter(tmp_path / "a", tmp_path / "m")
    batches = [[[1, 2]], [[3, 4], [5, 6, arch.vocab_size]]]
    with pytest.raises(DataError, match=r"TT403.*f\.json: batches\[1\]: sequences\[1\]\[2\]"):
        loss_curve(tmp_path / "m", adapter, batches, tmp_path / "out", where="f.json")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base_needs_consent(tmp_path: Path) -> None:
    make(tmp_path / "m", linear_config())
    init_checkpoint(load_arch(linear_config(), "o"), linear_config(), tmp_path / "other", seed=9)
    adapter = write_adapter(tmp_path / "a", tmp_path / "other")
    with pytest.raises(AdapterError, match="TT505") as caught:
        loss_curve(tmp_path / "m", adapter, [[[1, 2]]], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = open_source(tmp_path / "m").fingerprint()
    assert found in caught.value.hint
    loss_curve(tmp_path / "m", adapter, [[[1, 2]]], tmp_path / "out", accept_base=found)


def test_an_a_for_gate_and_one_for_up_stay_apart(tmp_path: Path) -> None:
    """As other tools write single experts; the joined form could not hold what was trained."""
    arch = make(tmp_path / "m", linear_config())
    adapter = write_adapter(tmp_path / "a", tmp_path / "m", experts=True)
    (adapter / MANIFEST_NAME).unlink()
    loss_curve(tmp_path / "m", adapter, [[[1, 2, 3]]] * 2, tmp_path / "out")
    before, after = (load_adapter(path, arch) for path in (adapter, tmp_path / "out/adapter"))
    assert after.targets == before.targets
    assert {t.experts.split_a for t in after.targets if t.experts is not None} == {True, False}
    moved = [n for n in before.tensors if not torch.equal(before.tensors[n], after.tensors[n])]
    assert any("experts.gate_up" in name for name in moved)


def test_a_loss_that_is_no_number_ends_the_curve(tmp_path: Path) -> None:
    make(tmp_path / "m", linear_config())
    adapter = write_adapter(tmp_path / "a", tmp_path / "m")
    with pytest.raises(RunError, match=r"TT602.*batches\[1\]"):
        loss_curve(tmp_path / "m", adapter, [[[1, 2, 3]]] * 3, tmp_path / "out", lr=1e30)
    assert not (tmp_path / "out").exists()


def test_a_full_output_directory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/other.txt").write_text("x")
    with pytest.raises(CheckpointError, match="TT309"):
        loss_curve(tmp_path / "none", tmp_path / "none", [[[1, 2]]], tmp_path / "out")
