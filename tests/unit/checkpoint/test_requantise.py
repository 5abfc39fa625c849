"""Merging into quantised weights: quantised again, with the error measured and a limit on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.test_packed_base import CONFIGS, small
from tests.unit.checkpoint.tiny import bit_equal, k3_config, make
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import read_arch
from trimtab.arch.maps import packed_forms
from trimtab.checkpoint import clone, recompute, rewrite
from trimtab.checkpoint.adapter import AdapterFile, AdapterMeta, load_adapter, save_adapter
from trimtab.checkpoint.base import require_base
from trimtab.checkpoint.codec import decode_part
from trimtab.checkpoint.copy_plan import plan_copy
from trimtab.checkpoint.load import stored_reader
from trimtab.checkpoint.manifest import read_manifest, verify_files
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.source import INDEX_NAME, open_source
from trimtab.cli.main import run
from trimtab.errors import AdapterError, CheckpointError
from trimtab.verify.merged import MergeChecks, merge_checked

LEAVES = ("q_b_proj", "o_proj", "down_proj")


def fp8_model(folder: Path, scale: float = 0.3) -> AdapterFile:
    """A DeepSeek-V3.2 in FP8 at `m`, and an adapter of it at `a`."""
    config = small("deepseek-v3.2-tiny")
    arch = make(folder / "m", config)
    targets = targets_of(arch, LEAVES)
    meta = AdapterMeta(str(folder / "m"), open_source(folder / "m").fingerprint())
    save_adapter(folder / "a", arch, targets, random_tensors(targets, scale=scale), meta)
    return load_adapter(folder / "a", arch)


def values(root: Path, names: set[str]) -> dict[str, Tensor]:
    """Decoded matrices of some parameters."""
    source = open_source(root)
    arch = read_arch(root)
    parts = plan_copy(source, arch, arch, names).parts
    return {part.param.name: decode_part(part, stored_reader(source), torch.float64) for part in parts}


def test_changed_matrices_are_quantised_again_and_the_error_is_measured(tmp_path: Path) -> None:
    adapter = fp8_model(tmp_path)
    report = merge_checked(tmp_path / "m", tmp_path / "a", tmp_path / "out")
    assert all(verdict.passed for verdict in report.verdicts), report.verdicts
    names = {f"{target.fqn}.weight" for target in adapter.targets}
    before, after = values(tmp_path / "m", names), values(tmp_path / "out", names)
    squares: dict[str, list[float]] = {}
    for target in adapter.targets:
        a, b = (adapter.tensors[f"{target.fqn}.lora.{side}"].double() for side in "AB")
        name = f"{target.fqn}.weight"
        exact = before[name] + target.scaling * b @ a
        total = squares.setdefault(name.split(".", 2)[2].removesuffix(".weight"), [0.0, 0.0])
        total[0] += float((after[name] - exact).square().sum())
        total[1] += float(exact.square().sum())
    found = {error.kind: error for error in report.copied.errors}
    assert found.keys() == squares.keys() and {e.form for e in found.values()} == {"FP8"}
    for kind, (error, value) in squares.items():
        assert found[kind].relative_rms == pytest.approx((error / value) ** 0.5, rel=1e-4)
        assert 0 < found[kind].relative_rms < 2.0**-4
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest.extra["errors"]
    assert all(verdict.passed for verdict in verify_files(tmp_path / "out"))


def test_only_changed_tensors_differ(tmp_path: Path) -> None:
    adapter = fp8_model(tmp_path)
    copied = copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out", adapter=adapter)
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("m", "out"))
    changed = {n for n in before if not bit_equal(before[n], after[n])}
    owners = {n.removeprefix("model.").removesuffix("_scale_inv") for n in changed}
    assert owners == {f"{target.fqn}.weight" for target in adapter.targets}
    assert (copied.tensors.changed, copied.tensors.identical) == (
        len(changed), len(before) - len(changed)
    )


def test_a_change_below_the_step_of_the_form_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8_model(tmp_path, scale=0.01)
    merge = ["merge", str(tmp_path / "m"), str(tmp_path / "a"), "--out", str(tmp_path / "out")]
    assert run(merge) == 1
    out = capsys.readouterr().out
    assert "FAIL  adapter's change lost in quantising again" in out and "identical" in out
    with pytest.raises(CheckpointError, match="TT305"):
        open_source(tmp_path / "out")
    assert run([*merge, "--max-lost", "2", "--no-check"]) == 0
    wide = [*merge[:-1], str(tmp_path / "wide"), "--dtype", "bf16", "--json"]
    capsys.readouterr()
    assert run(wide) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and {error["form"] for error in found["errors"]} == {"BF16"}


def test_logits_are_compared_on_the_prompts_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8_model(tmp_path)
    ids = tmp_path / "ids.json"
    ids.write_text('{"sequences": [[1, 2, 3, 4], [9]]}')
    merge = ["merge", str(tmp_path / "m"), str(tmp_path / "a"), "--prompts", str(ids), "--json"]
    loose = ["--max-logits-error", "0.3"]
    assert run([*merge, *loose, "--out", str(tmp_path / "one")]) == 0
    on_ids = json.loads(capsys.readouterr().out)["verdicts"]
    assert run([*merge[:3], *loose, "--out", str(tmp_path / "two"), "--json"]) == 0
    assert on_ids != json.loads(capsys.readouterr().out)["verdicts"]
    strict = ["--out", str(tmp_path / "strict"), "--max-logits-error", "1e-9"]
    assert run([*merge, *strict]) == 1
    (tmp_path / "none.txt").write_text("\n\n")
    assert run([*merge[:3], "--prompts", str(tmp_path / "none.txt"), "--out", "x"]) == 2
    assert "TT40" in capsys.readouterr().err


def shard(root: Path, count: int = 3) -> None:
    """Cut a single-file checkpoint into files that split matrices from their scales."""
    tensors = load_file(root / "model.safetensors")
    (root / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:06d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, root / file, metadata={"format": "pt", "made": "elsewhere"})
        weight_map |= dict.fromkeys(part, file)
    (root / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("block", [97, 2**21])
def test_files_keep_their_layout_whatever_the_size_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    adapter = fp8_model(tmp_path)
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "one", adapter=adapter)
    one = load_file(tmp_path / "one" / "model.safetensors")
    shard(tmp_path / "m")
    monkeypatch.setattr(recompute, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(rewrite, "BLOCK_BYTES", 4096)
    copied = copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out", adapter=adapter)
    assert copied.tensors.changed + copied.tensors.identical == len(one)
    for path in sorted((tmp_path / "m").iterdir()):
        again = (tmp_path / "out" / path.name).read_bytes()
        if path.suffix == ".safetensors":
            head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            assert again[:head] == path.read_bytes()[:head]
            for name, tensor in load_file(tmp_path / "out" / path.name).items():
                assert torch.allclose(tensor.float(), one[name].float(), rtol=0.2, atol=1e-2), name
        elif path.name != "manifest.json":
            assert again == path.read_bytes()


def test_a_copy_that_came_out_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "m")

    def wrong(src: Path, dst: Path) -> bool:
        raw = bytearray(src.read_bytes())
        raw[-1] ^= 1
        dst.write_bytes(raw)
        return False

    monkeypatch.setattr(rewrite, "clone_file", wrong)
    with pytest.raises(CheckpointError, match="TT315"):
        copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cloning_works_without_any_help_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 999
    (tmp_path / "a").write_bytes(data)
    clone.clone_file(tmp_path / "a", tmp_path / "b")

    def refused(*_: object) -> int:
        raise OSError(95, "not supported")

    monkeypatch.setattr(clone.os, "copy_file_range", refused)
    monkeypatch.setattr(clone.fcntl, "ioctl", refused)
    assert clone.clone_file(tmp_path / "a", tmp_path / "c") is False
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == data
    assert clone.shares_blocks(tmp_path / "a", tmp_path) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_the_fingerprint_follows_tensors_not_files(tmp_path: Path) -> None:
    make(tmp_path / "m", k3_config())
    before = open_source(tmp_path / "m").fingerprint()
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "bf16", dtype="bf16")
    shard(tmp_path / "m")
    assert open_source(tmp_path / "m").fingerprint() == before
    assert open_source(tmp_path / "bf16").fingerprint() != before


def test_an_adapter_of_another_base_is_refused_with_both_fingerprints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = fp8_model(tmp_path)
    make(tmp_path / "other", small("deepseek-v3.2-tiny"), seed=9)
    ours, theirs = (open_source(tmp_path / name).fingerprint() for name in ("m", "other"))
    other = open_source(tmp_path / "other")
    with pytest.raises(AdapterError, match="TT505") as caught:
        require_base(adapter, other, "a")
    assert ours in caught.value.rule and theirs in caught.value.rule
    require_base(adapter, other, "a", accept=theirs)
    merge = ["merge", str(tmp_path / "other"), str(tmp_path / "a"), "--out", str(tmp_path / "out")]
    assert run([*merge, "--no-check"]) == 2
    assert f"--accept-base {theirs}" in capsys.readouterr().err.replace("\n", " ")
    assert run([*merge, "--no-check", "--accept-base", theirs]) == 0


def test_checks_may_be_left_out(tmp_path: Path) -> None:
    fp8_model(tmp_path)
    checks = MergeChecks(logits=False)
    report = merge_checked(tmp_path / "m", tmp_path / "a", tmp_path / "out", checks=checks)
    assert {verdict.name for verdict in report.verdicts} == {"adapter's change lost in quantising again"}


def test_an_export_restores_the_files_of_a_release_byte_for_byte(tmp_path: Path) -> None:
    adapter = fp8_model(tmp_path)
    shard(tmp_path / "m")
    (tmp_path / "m" / "modeling.py").write_text("raise SystemExit\n")
    convert = ["convert", str(tmp_path / "m"), "--out", str(tmp_path / "c"), "--ep", "2", "--memory", "2GiB"]
    assert run(convert) == 0
    assert run(["export", str(tmp_path / "c"), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "m").iterdir()} - {"manifest.json"}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "m" / name).read_bytes(), name
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"manifest.json"}
    merged = [
        copy_checkpoint(open_source(tmp_path / base), tmp_path / f"merged-{base}", adapter=adapter)
        for base in ("m", "c")
    ]
    assert merged[0].tensors.changed == merged[1].tensors.changed > 0
    for path in (tmp_path / "merged-m").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "merged-c" / path.name).read_bytes()


def expert_adapter(folder: Path, form: str, scale: float) -> AdapterFile:
    """A model of a packed form at `m`, and an adapter of all its routed experts at `a`."""
    arch = make(folder / "m", CONFIGS[form])
    targets = resolve_targets(arch, target_modules=["o_proj"], rank=4, alpha=8, experts="per_expert")
    draw = torch.Generator().manual_seed(2)
    tensors = {
        f"{target.fqn}.lora.{side}": scale * torch.randn(target.shape(side), generator=draw)
        for target in targets for side in "AB"
    }
    save_adapter(folder / "a", arch, targets, tensors, AdapterMeta(str(folder / "m")))
    return load_adapter(folder / "a", arch)


@pytest.mark.parametrize("form", CONFIGS)
def test_adapters_of_packed_experts_are_merged_in_their_form(tmp_path: Path, form: str) -> None:
    adapter = expert_adapter(tmp_path, form, scale=0.2)
    source = open_source(tmp_path / "m")
    arch = read_arch(tmp_path / "m")
    copied = copy_checkpoint(source, tmp_path / "out", adapter=adapter)
    errors = {error.kind: error for error in copied.errors if error.form == form.upper()}
    assert errors.keys() >= {"mlp.experts.gate_up", "mlp.experts.down"}
    most = {"mxfp4": 0.15, "int4": 0.12, "fp8": 0.04}[form]
    assert all(0 < error.relative_rms < most for error in errors.values()), errors
    assert all(error.share_of_change < 0.5 for error in errors.values()), errors
    # What a reader of the new file sees is the sum, within the error that was reported.
    layer = next(n for n in packed_forms(arch) if n.endswith("experts.down")).removesuffix(".down")
    target = next(t for t in adapter.targets if t.fqn == f"{layer}.down")
    a, b = (adapter.tensors[f"{target.fqn}.lora.{side}"][1].double() for side in "AB")
    parts = {
        root: next(
            decode_part(part, stored_reader(open_source(tmp_path / root)), torch.float64)
            for part in plan_copy(source, arch, arch, {target.fqn}).parts if part.index == (1,)
        )
        for root in ("m", "out")
    }
    exact = parts["m"] + target.scaling * b @ a
    error = float((parts["out"] - exact).norm() / exact.norm())
    assert error == pytest.approx(errors["mlp.experts.down"].relative_rms, rel=0.3)


@pytest.mark.parametrize("form", CONFIGS)
def test_a_small_adapter_of_packed_experts_is_not_lost_in_silence(tmp_path: Path, form: str) -> None:
    expert_adapter(tmp_path, form, scale=0.02)
    report = merge_checked(tmp_path / "m", tmp_path / "a", tmp_path / "out")
    assert not all(verdict.passed for verdict in report.verdicts)
    assert any(verdict.measured > 0.5 and form.upper() in verdict.where for verdict in report.verdicts)
    wide = merge_checked(tmp_path / "m", tmp_path / "a", tmp_path / "wide", dtype="fp32")
    assert all(verdict.passed for verdict in wide.verdicts), wide.verdicts
