"""A rank's share is the right slice, read without the rest, from a checkpoint of any layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoint import tiny
from tests.unit.checkpoint.test_convert import fp8_config, run
from trimtab.arch.load import read_arch
from trimtab.checkpoint import blocks
from trimtab.checkpoint.layout import Degrees, Layout, logical_layout, rank_layout
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.share import Coordinates, load_share, share_cost
from trimtab.checkpoint.source import Source, open_source
from trimtab.errors import CheckpointError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share") / "model"
    tiny.make(folder)
    return folder


def whole(model: Path) -> dict[str, torch.Tensor]:
    """All tensors by our names, undivided."""
    arch = read_arch(model)
    return load_share(open_source(model), logical_layout(arch), Coordinates())


def test_shares_put_together_are_the_model(model: Path) -> None:
    layout = rank_layout(read_arch(model), Degrees(ep=2, pp=2, tp=2))
    full = whole(model)
    loaded, _ = load_model(model, base_dtype="native")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(full[name].reshape(tensor.shape), tensor), name
    for stage in range(2):
        shares = {
            (ep, tp): load_share(open_source(model), layout, Coordinates(stage, ep, tp))
            for ep in range(2) for tp in range(2)
        }
        for name in shares[0, 0]:
            experts = [shares[ep, 0][name] for ep in range(2)]
            shards = [shares[0, tp].get(name) for tp in range(2)]
            found = torch.cat(experts) if ".experts." in name else together(shards, full[name])
            assert torch.equal(found, full[name]), name
    layers = {name.split(".")[1] for name in shares[0, 0] if name.startswith("layers.")}
    assert layers and layers.isdisjoint({"0"}) and "lm_head.weight" in shares[0, 0]


def together(shards: list[torch.Tensor | None], full: torch.Tensor) -> torch.Tensor:
    held = [shard for shard in shards if shard is not None]
    if held[0].shape == full.shape:
        return held[0]
    axis = next(n for n, size in enumerate(held[0].shape) if size != full.shape[n])
    return torch.cat(held, axis)


@pytest.mark.parametrize("converted", ["ranks", "logical"])
def test_every_layout_gives_the_same_share(model: Path, tmp_path: Path, converted: str) -> None:
    degrees = Degrees(ep=2, tp=2)
    layout = rank_layout(read_arch(model), degrees)
    run(model, tmp_path / "c", degrees if converted == "ranks" else None)
    at = Coordinates(ep=1, tp=1)
    first = load_share(open_source(model), layout, at)
    second = load_share(open_source(tmp_path / "c"), layout, at)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    cost = share_cost(open_source(tmp_path / "c"), layout, at)
    assert (cost.extra == 0) == (converted == "ranks")
    if converted == "ranks":
        assert "nothing in vain" in cost.sentence(4)
    else:
        assert "pays after" in cost.sentence(4)


def test_decoded_shares_equal_the_decoded_model(tmp_path: Path) -> None:
    tiny.make(tmp_path / "m", fp8_config())
    arch = read_arch(tmp_path / "m")
    layout: Layout = rank_layout(arch, Degrees(ep=2))
    share = load_share(open_source(tmp_path / "m"), layout, Coordinates(ep=1), base_dtype="fp32")
    loaded, _ = load_model(tmp_path / "m", base_dtype="fp32")
    state = loaded.state_dict()
    assert torch.equal(share["layers.1.mlp.experts.down"], state["layers.1.mlp.experts.down.weight"][4:])
    name = "layers.0.self_attn.q_b_proj.weight"
    assert torch.equal(share[name], state[name])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K3 whose experts are matrices of 1 MiB packed."""
    config = tiny.k3_config()
    config["text_config"].update(
        num_hidden_layers=1, first_k_dense_replace=0, num_experts=8, moe_intermediate_size=1024,
        routed_expert_hidden_size=2048, vocab_size=4096,
    )
    config["text_config"]["linear_attn_config"].update(kda_layers=[1], full_attn_layers=[])
    folder = tmp_path_factory.mktemp("large") / "model"
    tiny.make(folder, config)
    return folder


def test_a_share_of_eight_reads_hardly_more_than_its_bytes(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(large)
    layout = rank_layout(read_arch(large), Degrees(ep=8))
    source.entries()
    read, counted = os.preadv, 0

    def counting(handle: int, buffers: list[Any], offset: int) -> int:
        nonlocal counted
        count = read(handle, buffers, offset)
        counted += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    share = load_share(source, layout, Coordinates(ep=3))
    big = sum(t.nbytes for t in share.values() if t.nbytes >= 2**20)
    held = sum(t.nbytes for t in share.values())
    assert big == 3 * 2**20
    # Small tensors are read exactly, so that what is read above the share belongs to the large.
    assert counted - held <= 0.02 * big
    assert counted < 0.5 * (large / "model.safetensors").stat().st_size
    full = load_file(large / "model.safetensors")
    name = next(n for n in full if n.endswith("experts.3.w2.weight_packed"))
    assert torch.equal(share["layers.0.mlp.experts.down.packed"][0], full[name])


def test_loading_reads_block_by_block(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = load_model(model)
    longest = 0
    read = Source.read

    def watched(self: Source, name: str, start: int = 0, length: int | None = None) -> bytearray:
        nonlocal longest
        raw = read(self, name, start, length)
        longest = max(longest, 0 if "experts" in name else len(raw))
        return raw

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(Source, "read", watched)
    found, _ = load_model(model)
    assert 0 < longest <= 1000
    state = expected.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())


def test_a_rank_that_does_not_exist_is_refused(model: Path) -> None:
    layout = rank_layout(read_arch(model), Degrees(ep=2))
    with pytest.raises(CheckpointError, match="must be below 2") as caught:
        load_share(open_source(model), layout, Coordinates(ep=2))
    assert caught.value.code == "TT313"
