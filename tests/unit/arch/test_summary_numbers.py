"""Released models have exactly the published numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter

import pytest

from trimtab.arch.load import load_arch
from trimtab.arch.maps import module_names, stored_tensors
from trimtab.arch.presets import preset_config, preset_names
from trimtab.arch.summary import Summary, summarise


def summary_of(name: str) -> Summary:
    return summarise(load_arch(preset_config(name), name))


def test_kimi_k3_has_the_published_numbers() -> None:
    started = time.perf_counter()
    summary = summary_of("kimi-k3")
    assert time.perf_counter() - started < 3
    assert summary.total_parameters == 2_779_931_837_184
    assert summary.active_parameters_per_token == 104_189_614_848
    assert summary.num_tensors == 497_220
    assert summary.stored_bytes == 1_560_860_324_864
    assert summary.bf16_bytes == 5_559_863_674_368
    assert summary.kv_bytes_per_token == 27_648
    assert summary.state_bytes_per_sequence == 434_110_464
    assert summary.conv_bytes_per_sequence == 15_261_696
    assert Counter(layer.mixer for layer in summary.layers) == {"kda": 69, "mla": 24}
    assert Counter(layer.ffn for layer in summary.layers) == {"dense": 1, "moe": 92}
    assert [layer.index for layer in summary.layers if layer.mixer == "mla"][-3:] == [87, 91, 92]
    assert not any(layer.indexer for layer in summary.layers)


def test_k31_adds_only_the_indexer() -> None:
    k3, k31 = summary_of("kimi-k3"), summary_of("kimi-k3.1")
    indexer = 32 * 128 * 1536 + 128 * 7168 + 2 * 128 + 32 * 7168
    assert k31.total_parameters - k3.total_parameters == 24 * indexer
    assert k31.kv_bytes_per_token - k3.kv_bytes_per_token == 24 * 128 * 2
    assert k31.num_tensors - k3.num_tensors == 24 * 5
    assert {layer.indexer for layer in k31.layers if layer.mixer == "mla"} == {"full"}


@pytest.mark.parametrize("name", preset_names())
def test_sums_agree_with_the_full_list_of_tensors(name: str) -> None:
    summary = summary_of(name)
    tensors = stored_tensors(load_arch(preset_config(name), name))
    assert summary.num_tensors == len(tensors)
    assert summary.stored_bytes == sum(tensor.num_bytes for tensor in tensors)
    assert sum(summary.bytes_by_dtype.values()) == summary.stored_bytes
    assert sum(owner.stored_bytes for owner in summary.owners) == summary.stored_bytes


META_COUNT = """
import json, sys, warnings
warnings.simplefilter("ignore")
for name in ("fla", "causal_conv1d", "kernels"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import KimiLinearConfig
config = KimiLinearConfig(**json.load(sys.stdin))
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
print(json.dumps({
    "parameters": sum(tensor.numel() for tensor in model.state_dict().values()),
    "modules": [name for name, _ in model.named_modules()],
}))
"""


@pytest.mark.slow
def test_kimi_linear_48b_counts_what_transformers_builds() -> None:
    pytest.importorskip("transformers")
    config = json.dumps(preset_config("kimi-linear-48b"))
    run = subprocess.run(
        [sys.executable, "-c", META_COUNT], input=config, capture_output=True, text=True,
        check=True, timeout=240,
    )
    built = json.loads(run.stdout)
    arch = load_arch(preset_config("kimi-linear-48b"))
    assert summarise(arch).total_parameters == built["parameters"] == 49_122_681_728
    assert set(module_names(arch).values()) <= set(built["modules"])
