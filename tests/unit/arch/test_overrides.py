"""Ranks of single groups, and what serving engines apply."""

from __future__ import annotations

import dataclasses

import pytest

from trimtab.arch.adapter import LoRATarget, resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.overrides import Override, apply_overrides, scale_expert_ranks
from trimtab.arch.presets import preset_config
from trimtab.arch.serving import servable
from trimtab.arch.spec import ArchSpec, MoESpec
from trimtab.errors import AdapterError


@pytest.fixture(scope="module")
def arch() -> ArchSpec:
    return load_arch(preset_config("k3.1-tiny"), "k3.1-tiny")


def targets_of(arch: ArchSpec, scaling: str = "standard") -> tuple[LoRATarget, ...]:
    words = ["attention", "shared_experts"]
    return resolve_targets(arch, target_modules=words, rank=8, alpha=16, scaling=scaling)  # type: ignore[arg-type]


def test_the_narrowest_word_counts_and_the_rest_is_unchanged(arch: ArchSpec) -> None:
    given = {"attention": Override(rank=4), "sparse_attention": Override(rank=2, alpha=10.0)}
    found = apply_overrides(targets_of(arch), given)
    by_owner = {t.owner: t for t in found}
    assert (by_owner["kda"].rank, by_owner["kda"].scaling) == (4, 2.0)  # alpha moved with the rank
    assert (by_owner["mla"].rank, by_owner["mla"].alpha) == (2, 10.0)
    assert (by_owner["shared_expert"].rank, by_owner["shared_expert"].alpha) == (8, 16.0)
    assert [t.fqn for t in found] == [t.fqn for t in targets_of(arch)]


def test_rslora_keeps_its_scaling_too(arch: ArchSpec) -> None:
    before = targets_of(arch, "rslora")[0]
    after = apply_overrides(targets_of(arch, "rslora"), {"attention": Override(rank=2)})[0]
    assert after.rank == 2 and after.scaling == pytest.approx(before.scaling, rel=1e-12)


@pytest.mark.parametrize("words", [["projector"], ["attention", "linear_attention", "sparse_attention"]])
def test_a_word_that_covers_nothing_is_named(arch: ArchSpec, words: list[str]) -> None:
    with pytest.raises(AdapterError, match=r"TT501.*overrides\.(projector|attention)"):
        apply_overrides(targets_of(arch), {word: Override(rank=2) for word in words})


def test_routed_experts_share_the_rank_among_the_active_ones(arch: ArchSpec) -> None:
    layer, ffn = next(
        (i, s.ffn) for i, s in enumerate(arch.layers) if isinstance(s.ffn, MoESpec)
    )
    expert = dataclasses.replace(targets_of(arch)[0], owner="routed_expert", layer=layer, rank=32)
    other = targets_of(arch)[1]
    found = scale_expert_ranks(arch, (expert, other))
    assert found[0].rank == 32 // ffn.top_k and found[0].scaling == expert.scaling
    assert found[1] == other
    assert scale_expert_ranks(arch, (dataclasses.replace(expert, rank=1),))[0].rank == 1


def test_engines_ignore_the_absorbed_matrix_and_trimtab_does_not() -> None:
    for engine in ("vllm", "sglang", "vllm-ascend"):
        assert servable(engine, "mla", "kv_b_proj").answer == "no"
        assert servable(engine, "kda", "q_proj").answer == "yes"
        assert servable(engine, "routed_expert", "gate_up").answer == "unproven"
    assert servable("trimtab", "mla", "kv_b_proj").answer == "yes"
