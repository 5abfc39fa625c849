"""A slice holds the real bytes of some layers and experts, as a checkpoint that loads and runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracles import random_glm5_next
from tests.unit.checkpoint import tiny
from tests.unit.checkpoint.test_convert import DEGREES, MEMORY, fp8_config, run
from trimtab.arch.load import read_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import MoESpec
from trimtab.checkpoint.convert import write_plan
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.output import open_output
from trimtab.checkpoint.slice import plan_slice
from trimtab.checkpoint.source import INDEX_NAME, open_source
from trimtab.checkpoint.structure import require_equal
from trimtab.cli.main import run as cli
from trimtab.errors import ArchError, ConfigError
from trimtab.models.context import ForwardContext


def cut(src: Path, dst: Path, layers: list[int], experts: int | None, **options: Any) -> Path:
    plan = plan_slice(open_source(src), layers, experts, **options)
    write_plan(plan, open_output(dst), memory=MEMORY)
    require_equal(read_arch(dst), open_source(dst).entries(), "slice")
    return dst


def config(family: str) -> dict[str, Any]:
    if family == "glm5_next":
        return random_glm5_next.tiny_config(num_experts_per_tok=2)
    if family == "fp8":
        return fp8_config() | {"num_hidden_layers": 4, "n_routed_experts": 16}
    if family == "int4":
        return preset_config("kimi-k2.5-tiny")
    return {"k3": tiny.k3_config, "kimi_linear": tiny.linear_config}[family]()


@pytest.mark.parametrize("family", ["k3", "kimi_linear", "glm5_next", "fp8", "int4"])
def test_the_first_layers_of_every_family(family: str, tmp_path: Path) -> None:
    arch = tiny.make(tmp_path / "m", config(family))
    spec = arch.layers[1].ffn
    assert isinstance(spec, MoESpec)
    experts = spec.num_experts // 2
    cut(tmp_path / "m", tmp_path / "s", [0, 1], experts)
    sliced = read_arch(tmp_path / "s")
    assert sliced.layers == (arch.layers[0], replace(arch.layers[1], ffn=replace(spec, num_experts=experts)))
    before = load_file(tmp_path / "m" / "model.safetensors")
    after = load_file(tmp_path / "s" / "model.safetensors")
    each = spec.num_experts // spec.groups
    kept = [g * each + n for g in range(spec.groups) for n in range(experts // spec.groups)]
    for name, tensor in after.items():
        of = name
        if spec.groups > 1 and ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, _, leaf = tail.partition(".")
            of = f"{head}.experts.{kept[int(number)]}.{leaf}"
        expected = before[of]
        if ".gate." in name:
            expected = expected[kept]
        assert tiny.bit_equal(tensor, expected), name


def test_layers_from_the_middle_are_numbered_anew(tmp_path: Path) -> None:
    tiny.make(tmp_path / "m")
    cut(tmp_path / "m", tmp_path / "s", [1, 3], None, vision=False)
    before = load_file(tmp_path / "m" / "model.safetensors")
    after = load_file(tmp_path / "s" / "model.safetensors")
    assert not any("vision" in name or "mm_projector" in name for name in after)
    prefix = "language_model.model.layers."
    for name, tensor in after.items():
        number = {"0": "1", "1": "3"}.get(name.removeprefix(prefix).split(".")[0], "")
        of = f"{prefix}{number}.{name.removeprefix(prefix).split('.', 1)[1]}" if number else name
        assert tiny.bit_equal(tensor, before[of]), name


def test_a_slice_computes_what_the_first_layers_compute(tmp_path: Path) -> None:
    tiny.make(tmp_path / "m", tiny.linear_config())
    whole, _ = load_model(tmp_path / "m", base_dtype="fp32")
    part, _ = load_model(cut(tmp_path / "m", tmp_path / "s", [0, 1, 2, 3], 4), base_dtype="fp32")
    tokens, context = torch.arange(7), ForwardContext.packed([7])
    with torch.no_grad():
        assert torch.equal(part(tokens, context), whole(tokens, context))


def test_a_converted_checkpoint_gives_the_same_slice(tmp_path: Path) -> None:
    tiny.make(tmp_path / "m")
    run(tmp_path / "m", tmp_path / "c", DEGREES)
    cut(tmp_path / "m", tmp_path / "a", [0, 1], 2, shard_bytes=2**16)
    cut(tmp_path / "c", tmp_path / "b", [0, 1], 2, shard_bytes=2**16)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert INDEX_NAME in names and len(names) > 5
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("layers", "experts", "words"),
    [([0, 9], None, "0 to 3"), ([1, 0], None, "in order"), ([0, 1], 5, "at most 4"),
     ([0, 1], 1, "must leave the 2 experts")],
)
def test_selections_that_cannot_be_are_refused(
    tmp_path: Path, layers: list[int], experts: int | None, words: str
) -> None:
    tiny.make(tmp_path / "m")
    with pytest.raises(ConfigError, match=words):
        plan_slice(open_source(tmp_path / "m"), layers, experts)


def test_a_selection_that_no_config_can_say_is_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path / "m", fp8_config() | {"num_hidden_layers": 4, "first_k_dense_replace": 2})
    cut(tmp_path / "m", tmp_path / "s", [1, 2], None)
    tiny.make(tmp_path / "g", random_glm5_next.tiny_config(kinds="KSsK"))
    with pytest.raises(ArchError, match="no selection to share"):
        plan_slice(open_source(tmp_path / "g"), [0, 2], None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.make(tmp_path / "m")
    command = ["slice", str(tmp_path / "m"), "--out", str(tmp_path / "s"), "--memory", "1GB"]
    assert cli([*command, "--layers", "0-1", "--experts", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"]
    assert cli(["verify", "files", str(tmp_path / "s")]) == 0
    assert cli([*command, "--layers", "1-0"]) == 2
