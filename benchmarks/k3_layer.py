"""A checkpoint of one real-size K3 layer, written as a stream: what the conversion benchmarks read."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_tensors
from trimtab.arch.presets import preset_config
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.output import LocalOutput
from trimtab.checkpoint.source import INDEX_NAME
from trimtab.checkpoint.stream import Pipeline, plan_file

SHARD_BYTES = 5 * 10**9
_NOISE_BYTES = 2**22


def config(experts: int, vocabulary: int) -> dict[str, Any]:
    """K3 with a single layer: KDA, and so many experts of the released size."""
    made: dict[str, Any] = copy.deepcopy(preset_config("kimi-k3"))
    made.pop("vision_config", None)
    text = made["text_config"]
    text.update(
        num_hidden_layers=1, first_k_dense_replace=0, num_experts=experts, vocab_size=vocabulary,
        num_experts_per_token=min(16, experts),
    )
    text["linear_attn_config"].update(kda_layers=[1], full_attn_layers=[])
    return made


class _Noise:
    """A stored tensor of noise that looks like weights; every tensor has other bytes."""

    def __init__(self, stored: StoredTensor, noise: dict[str, memoryview]) -> None:
        self.name, self.dtype, self.shape = stored.name, stored.dtype, stored.shape
        self.num_bytes = self.grain = stored.num_bytes
        kind = "scale" if stored.transform == "mxfp4_scale" else stored.dtype
        self._noise = noise[kind]
        digest = hashlib.sha256(stored.name.encode()).digest()
        self._shift = int.from_bytes(digest[:4], "little") % (_NOISE_BYTES // 8) * 8

    def fill(self, begin: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            start = (begin + done + self._shift) % _NOISE_BYTES
            count = min(len(out) - done, _NOISE_BYTES - start)
            out[done : done + count] = self._noise[start : start + count]
            done += count


def _noises() -> dict[str, memoryview]:
    draw = np.random.default_rng(20261201)
    normal = draw.standard_normal(_NOISE_BYTES // 2).astype(np.float32) * np.float32(0.02)
    return {
        "U8": memoryview(draw.integers(0, 256, _NOISE_BYTES, np.uint8)),
        "scale": memoryview(draw.integers(110, 126, _NOISE_BYTES, np.uint8)),
        "BF16": memoryview((normal.view(np.uint32) >> 16).astype(np.uint16)).cast("B"),
        "F32": memoryview(normal[: _NOISE_BYTES // 4]).cast("B"),
    }


def write_checkpoint(root: Path, experts: int, vocabulary: int) -> int:
    """Write the checkpoint in shards of at most 5 GB with an index; returns its bytes."""
    made, noise = config(experts, vocabulary), _noises()
    root.mkdir(parents=True)
    output = LocalOutput(root)
    shards: list[list[_Noise]] = [[]]
    held = 0
    for stored in stored_tensors(load_arch(made)):
        if held + stored.num_bytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(_Noise(stored, noise))
        held += stored.num_bytes
    weight_map = {}
    with Pipeline(2**28, 2) as pipeline:
        for number, tensors in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            output.write(plan_file(name, tensors), pipeline, lambda _: None)
            weight_map |= {tensor.name: name for tensor in tensors}
    output.close()
    (root / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(made))
    return sum(tensor.num_bytes for tensors in shards for tensor in tensors)
