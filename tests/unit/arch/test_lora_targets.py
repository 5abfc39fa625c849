"""Targets are chosen from the inventory, never guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.arch.adapter import LoRATarget, resolve_targets, target_table
from trimtab.arch.spec import (
    ActivationSpec,
    ArchSpec,
    AttnRes,
    DenseSpec,
    IndexerSpec,
    KDASpec,
    LatentSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    VisionSpec,
)
from trimtab.arch.whole import full_targets
from trimtab.errors import AdapterError

ACT = ActivationSpec("situ", 4.0, 25.0)
KDA = KDASpec(2, 8, 4, -5.0, None, 8, 1e-6)
MLA = MLASpec(2, 12, 8, 8, 4, 8, 0.3, 1e-6, gate="channel", indexer=IndexerSpec(2, 8, 4))
MOE = MoESpec(4, 2, 8, 16, ACT, True, 1.0, latent=LatentSpec(8, 1e-6))


@pytest.fixture
def arch() -> ArchSpec:
    layers = (
        LayerSpec(KDA, DenseSpec(32, ACT)), LayerSpec(KDA, MOE),
        LayerSpec(KDA, MOE), LayerSpec(MLA, MOE),
    )
    return ArchSpec("kimi_k3", "tiny", 16, 64, layers, AttnRes(2, 1e-6), 1e-6, 128)


def pick(arch: ArchSpec, *words: str, **kw: object) -> tuple[LoRATarget, ...]:
    return resolve_targets(arch, target_modules=words, rank=4, alpha=8, **kw)  # type: ignore[arg-type]


def test_literal_leaf_names_select_each_module_of_that_name(arch: ArchSpec) -> None:
    targets = pick(arch, "q_proj", "k_proj", "v_proj", "o_proj")
    assert [t.fqn for t in targets if t.leaf == "q_proj"] == [
        f"layers.{i}.self_attn.q_proj" for i in range(3)
    ]
    assert sum(t.leaf == "o_proj" for t in targets) == 4
    first = targets[0]
    assert (first.in_features, first.out_features, first.scaling) == (16, 16, 2.0)


def test_group_words_cover_the_owner_and_leave_out_indexer_and_convolutions(arch: ArchSpec) -> None:
    leaves = {t.leaf for t in pick(arch, "sparse_attention")}
    assert leaves == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"}
    linear = {t.leaf for t in pick(arch, "linear_attention")}
    assert linear == {"q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_a_proj", "g_b_proj",
                      "o_proj"}
    both = pick(arch, "attention")
    assert len(both) == len(pick(arch, "sparse_attention")) + len(pick(arch, "linear_attention"))
    assert {t.layer for t in pick(arch, "dense_ffn")} == {0}
    assert {t.branch for t in pick(arch, "shared_experts")} == {"shared_experts"}
    assert {t.leaf for t in pick(arch, "latent")} == {"latent_down", "latent_up"}


def test_patterns_and_regular_expressions(arch: ArchSpec) -> None:
    assert {t.layer for t in pick(arch, "layers.3.*")} == {3}
    assert {t.leaf for t in pick(arch, "kv_*")} == {"kv_a_proj_with_mqa", "kv_b_proj"}
    assert {t.layer for t in pick(arch, r"re:layers\.[01]\.self_attn\.q_proj")} == {0, 1}
    assert [t.fqn for t in pick(arch, "shared_experts.up_proj")] == [
        f"layers.{i}.mlp.shared_experts.up_proj" for i in (1, 2, 3)
    ]


def test_one_module_named_twice_is_one_target(arch: ArchSpec) -> None:
    assert len(pick(arch, "q_proj", "linear_attention")) == len(pick(arch, "linear_attention"))


@pytest.mark.parametrize("word", ["q_porj", "re:.*q_porj", "qq*", "gated_attention"])
def test_a_word_that_matches_nothing_lists_names(arch: ArchSpec, word: str) -> None:
    with pytest.raises(AdapterError, match=r"\[TT501\] finetune.lora.target_modules\[1\]") as caught:
        pick(arch, "o_proj", word)
    assert "q_proj" in str(caught.value) and word in str(caught.value)


def test_the_nearest_name_comes_first(arch: ArchSpec) -> None:
    with pytest.raises(AdapterError, match="did you mean q_proj"):
        pick(arch, "q_porj")


@pytest.mark.parametrize(
    "word",
    ["indexer", "wq_b", "weights_proj", "*indexer*", "router", "mlp.router", "embed", "lm_head",
     "norm", "input_layernorm", "q_conv1d", "experts.gate_up", "re:.*indexer.*"],
)
def test_what_must_stay_frozen_is_refused(arch: ArchSpec, word: str) -> None:
    with pytest.raises(AdapterError, match="TT503"):
        pick(arch, word)


def test_a_wide_pattern_leaves_frozen_modules_out(arch: ArchSpec) -> None:
    fqns = {t.fqn for t in pick(arch, "*")}
    assert not any("indexer" in f or "router" in f or "norm" in f or "conv" in f for f in fqns)
    assert "layers.0.mlp.up_proj" in fqns


def test_routed_experts_come_beside_the_named_modules(arch: ArchSpec) -> None:
    targets = pick(arch, "q_proj", experts="per_expert")
    assert {t.leaf for t in targets} == {"q_proj", "gate_up", "down"}
    dense = replace(arch, layers=arch.layers[:1])
    with pytest.raises(AdapterError, match=r"TT501.*no routed experts"):
        pick(dense, "q_proj", experts="per_expert")


def test_rslora_divides_by_the_root(arch: ArchSpec) -> None:
    assert pick(arch, "q_proj", scaling="rslora")[0].scaling == 4.0


def test_table_counts_parameters_and_names_the_uncovered_mla_projections(arch: ArchSpec) -> None:
    targets = pick(arch, "q_proj", "k_proj", "v_proj", "o_proj")
    table = target_table(arch, targets)
    assert [(r.leaf, r.kind, r.count, r.available) for r in table.rows] == [
        ("q_proj", "kda", 3, 3), ("k_proj", "kda", 3, 3), ("v_proj", "kda", 3, 3),
        ("o_proj", "kda", 3, 3), ("o_proj", "mla", 1, 1),
    ]
    assert table.num_parameters == sum(t.num_parameters for t in targets)
    assert table.num_bytes == 4 * table.num_parameters
    mla = [n for n in table.notes if "MLA" in n]
    assert len(mla) == 1 and "only o_proj adapted" in mla[0]
    for leaf in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        assert leaf in mla[0]


def test_full_attention_leaves_no_note(arch: ArchSpec) -> None:
    assert target_table(arch, pick(arch, "attention")).notes == ()


VISION = VisionSpec(2, 8, 2, 16, 16, 14, 4, 4, 4, 2, 2, 1e-5)


def test_the_projector_is_a_group_and_the_tower_is_refused(arch: ArchSpec) -> None:
    seeing = replace(arch, vision=VISION, image_token_id=3)
    targets = pick(seeing, "projector", "latent")
    assert [t.fqn for t in targets][:2] == ["projector.proj.0", "projector.proj.2"]
    assert targets[0].branch == "projector" and targets[0].layer is None
    assert [t.fqn for t in pick(seeing, "projector.proj.2")] == ["projector.proj.2"]
    assert not any(t.owner == "projector" for t in pick(seeing, "*"))
    for word in ("vision.blocks.0.wqkv", "vision.*", "projector.post_norm"):
        with pytest.raises(AdapterError, match="TT503"):
            pick(seeing, word)
    with pytest.raises(AdapterError, match="no module of this group"):
        pick(arch, "projector")


def test_a_projector_trained_in_full_is_a_row_of_the_table(arch: ArchSpec) -> None:
    seeing = replace(arch, vision=VISION, image_token_id=3)
    full = full_targets(seeing)
    assert [p.name for p in full] == [
        f"projector.{n}.weight" for n in ("proj.0", "proj.2", "post_norm")
    ]
    row = target_table(seeing, pick(seeing, "latent"), full).rows[-1]
    assert (row.kind, row.num_parameters) == ("full", 32 * 32 + 16 * 32 + 16)
    with pytest.raises(AdapterError, match="no projector"):
        full_targets(arch)
