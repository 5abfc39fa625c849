"""Ten AdamW steps of `trimtab verify curve` equal transformers + peft, step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles import random_dsa, random_glm5_next, random_kimi_linear
from tests.oracles.random_tensors import random_ids
from tests.support.compare import relative_error
from trimtab.arch.adapter import LoRATarget, resolve_targets
from trimtab.arch.load import load_arch
from trimtab.checkpoint.adapter import WEIGHTS_NAME, AdapterMeta, save_adapter
from trimtab.verify.curve import loss_curve, read_batches
from trimtab.verify.tolerances import limit

pytestmark = pytest.mark.parity
STEPS, LR = 10, 1e-3
ROOT = Path(__file__).parents[2]


def kimi_linear(folder: Path) -> Mapping[str, Any]:
    config = random_kimi_linear.tiny_config()
    random_kimi_linear.write_checkpoint(folder, config, seed=1)
    return config


def glm5_next(folder: Path) -> Mapping[str, Any]:
    config = random_glm5_next.tiny_config()
    random_glm5_next.write_checkpoint(folder, config, seed=1)
    return config


def deepseek_v32(folder: Path) -> Mapping[str, Any]:
    config = random_dsa.tiny_config("deepseek_v32")
    random_dsa.write_checkpoint(folder, config, seed=1)
    return config


def start_adapter(folder: Path, config: Mapping[str, Any], out: Path) -> None:
    """A PEFT file whose B is not zero, so that A moves from the first step on."""
    arch = load_arch(dict(config), "tiny")
    targets = resolve_targets(arch, target_modules=["attention"], rank=4, alpha=8)
    draw = torch.Generator().manual_seed(3)
    save_adapter(out, arch, targets, random_ab(targets, draw), AdapterMeta(str(folder)))


def random_ab(targets: tuple[LoRATarget, ...], draw: torch.Generator) -> dict[str, Tensor]:
    tensors = {}
    for t in targets:
        tensors[f"{t.fqn}.lora.A"] = 0.2 * torch.randn(t.rank, t.in_features, generator=draw)
        tensors[f"{t.fqn}.lora.B"] = 0.1 * torch.randn(t.out_features, t.rank, generator=draw)
    return tensors


def write_batches(path: Path, config: Mapping[str, Any]) -> None:
    draw = random_glm5_next.random_words if config["model_type"] == "glm5_next" else random_ids
    batches = [[draw(config, n, seed=100 * step + n) for n in (9, 21)] for step in range(STEPS)]
    path.write_text(json.dumps({"batches": batches}))


def their_curves(model: Path, adapter: Path, batches: Path, out: Path) -> None:
    command = [sys.executable, "-m", "tests.parity.peft_curve",
               *(str(p) for p in (model, adapter, batches, out)), str(LR)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT,
                          timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("family", [kimi_linear, glm5_next, deepseek_v32])
def test_ten_steps_equal_transformers_and_peft(tmp_path: Path, family: Any) -> None:
    model, adapter, batches = tmp_path / "m", tmp_path / "a", tmp_path / "batches.json"
    config = family(model)
    start_adapter(model, config, adapter)
    write_batches(batches, config)
    their_curves(model, adapter, batches, tmp_path / "theirs")
    for dtype in ("float64", "float32"):
        out = tmp_path / dtype
        ours = loss_curve(model, adapter, read_batches(batches), out, lr=LR, dtype=dtype)  # type: ignore[arg-type]
        theirs = json.loads((tmp_path / "theirs" / dtype / "losses.json").read_text())["loss"]
        assert len(ours) == STEPS and ours[0] != ours[-1]
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        assert worst <= limit(f"curve.loss.{dtype}"), f"{dtype}: {worst:.2g}"
        found = load_file(out / "adapter" / WEIGHTS_NAME)
        expected = load_file(tmp_path / "theirs" / dtype / WEIGHTS_NAME)
        assert found.keys() == expected.keys()
        error = max(relative_error(found[k].double(), expected[k].double()) for k in found)
        assert error <= limit(f"curve.adapter.{dtype}"), f"{dtype}: {error:.2g}"
