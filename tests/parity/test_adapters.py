"""Every family that transformers has: peft loads our adapters as they stand and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles import random_dsa, random_glm5_next, random_kimi_k25, random_kimi_linear
from tests.oracles.random_tensors import random_ids
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import read_arch
from trimtab.arch.params import inventory
from trimtab.checkpoint.adapter import AdapterMeta, attach_adapter, load_adapter, save_adapter
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import export_adapter
from trimtab.verify.logits import sequence_logits
from trimtab.verify.tolerances import limit

# Slow: one process of transformers and peft for all 42 adapters.
pytestmark = [pytest.mark.parity, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
FFN = ["dense_ffn", "shared_experts"]


@dataclass(frozen=True)
class Case:
    """An adapter.

    Args:
        words: of `target_modules`.
        experts: layout of those of routed experts.
        mixed: feed-forward matrices have another rank and scaling.
        routers: these are trained in full.
        for_engines: it is exported for an engine.
    """

    words: tuple[str, ...]
    experts: str
    mixed: bool = False
    routers: bool = False
    for_engines: bool = False


CASES = {
    "attention and FFN": Case(("attention", *FFN), "none"),
    "some modules of a name": Case((r"re:.*\.1\..*o_proj", r"re:.*[12]\.mlp\..*down_proj"), "none"),
    "all experts": Case(("attention", *FFN), "per_expert"),
    "all experts, ranks differ, routers in full": Case(("attention", *FFN), "per_expert", mixed=True, routers=True),
    "all experts, outer matrices shared": Case(("attention",), "shared_outer"),
    "all experts, for engines": Case(
        ("attention", *FFN), "per_expert", mixed=True, for_engines=True
    ),
    "experts alone, for engines": Case(("o_proj",), "shared_outer", for_engines=True),
}


def kimi_linear(folder: Path) -> list[int]:
    config = random_kimi_linear.tiny_config()
    random_kimi_linear.write_checkpoint(folder, config, seed=1)
    return random_ids(config, 30, seed=5)


def glm5_next(folder: Path) -> list[int]:
    config = random_glm5_next.tiny_config()
    random_glm5_next.write_checkpoint(folder, config, seed=1)
    return random_glm5_next.random_words(config, 30, seed=5)


def kimi_k25(folder: Path) -> list[int]:
    config = random_kimi_k25.tiny_config()
    random_kimi_k25.write_checkpoint(folder, config, seed=1)
    return random_ids(config, 30, seed=5)


def dsa(family: str) -> Callable[[Path], list[int]]:
    def write(folder: Path) -> list[int]:
        config = random_dsa.tiny_config(family)
        random_dsa.write_checkpoint(folder, config, seed=1)
        return random_ids(config, 30, seed=5)

    return write


FAMILIES: dict[str, Callable[[Path], list[int]]] = {
    "deepseek_v3": dsa("deepseek_v3"), "deepseek_v32": dsa("deepseek_v32"),
    "glm_moe_dsa": dsa("glm_moe_dsa"), "glm5_next": glm5_next, "kimi_k25": kimi_k25,
    "kimi_linear": kimi_linear,
}


@dataclass(frozen=True)
class Job:
    base: Path
    adapter: Path
    ids: list[int]
    out: Path
    saved: Path


def write_adapter(base: Path, dst: Path, case: Case) -> None:
    arch = read_arch(base)
    targets = resolve_targets(
        arch, target_modules=case.words, rank=4, alpha=8, dropout=0.1, experts=case.experts,  # type: ignore[arg-type]
    )
    if case.mixed:
        targets = tuple(
            replace(t, rank=2, alpha=6.0) if ".mlp." in t.fqn else t for t in targets
        )
    draw = torch.Generator().manual_seed(3)
    tensors = {
        f"{t.fqn}.lora.{side}": 0.3 * torch.randn(t.shape(side), generator=draw)
        for t in targets for side in ("A", "B")
    }
    if case.routers:
        tensors |= {
            p.name: 0.2 * torch.randn(p.shape, generator=draw)
            for p in inventory(arch) if p.owner == "router"
        }
    made = dst.with_name(f"{dst.name}-made") if case.for_engines else dst
    save_adapter(made, arch, targets, tensors, AdapterMeta(str(base)))
    if case.for_engines:
        export_adapter(made, dst, engine="vllm")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Job]]:
    """All adapters, run through transformers and peft in one process."""
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for family, write in FAMILIES.items():
        ids = write(root / family)
        for number, (name, case) in enumerate(CASES.items()):
            at = root / f"{family}-{number}"
            job = Job(root / family, at, ids, at.with_suffix(".out"), at.with_suffix(".saved"))
            write_adapter(job.base, job.adapter, case)
            found[family, name] = job
    listed = [
        {"base": str(j.base), "adapter": str(j.adapter), "ids": j.ids, "out": str(j.out),
         "saved": str(j.saved)}
        for j in found.values()
    ]
    (root / "jobs.json").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "tests.parity.peft_logits", str(root / "jobs.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT,
                          timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    yield found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_what_we_compute(
    jobs: dict[tuple[str, str], Job], family: str, name: str
) -> None:
    job = jobs[family, name]
    theirs = load_file(job.out)
    model, arch = load_model(job.base, base_dtype="fp64", compute_dtype=torch.float64)
    plain = sequence_logits(model, job.ids)
    adapter = load_adapter(job.adapter, arch)
    assert int(theirs["adapted"]) == len(adapter.targets)
    attach_adapter(model, adapter)
    ours = sequence_logits(model, job.ids)
    assert error(plain, ours) > 0.5, "the adapter must matter"
    assert error(theirs["logits"], ours) <= limit("model.logits.float64")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_peft_saves_is_the_same_adapter(
    jobs: dict[tuple[str, str], Job], family: str, name: str
) -> None:
    job, logits = jobs[family, name], []
    for path in (job.adapter, job.saved):
        model, arch = load_model(job.base, base_dtype="fp64", compute_dtype=torch.float64)
        attach_adapter(model, load_adapter(path, arch))
        logits.append(sequence_logits(model, job.ids))
    assert error(*logits) <= limit("model.logits.float64")


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
