"""Memory: exact state bytes, lines that sum, published peaks, and what each choice changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import load_cluster
from trimtab.plan.job import FSDP, MEGATRON, Job, Recompute, choose_adapters
from trimtab.plan.memory import Layout, MemoryModel, StageMemory
from trimtab.plan.placement import Degrees
from trimtab.plan.stages import split

H200 = load_cluster("h200")
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 12, "vocab_size": 128256,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
}
DEEPSEEK_V3 = preset_config("deepseek-v3") | {
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "quantization_config": None,
}


@pytest.fixture(scope="module")
def k3() -> Outline:
    return load_outline(preset_config("kimi-k3"))


def lora(outline: Outline, **values: object) -> Job:
    base = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"))
    return replace(base, **values)  # type: ignore[arg-type]


def worst(outline: Outline, job: Job, degrees: Degrees, *, resident: bool = True) -> StageMemory:
    layout = Layout(degrees, split(outline, degrees.pp), "dedup", resident)
    return MemoryModel(outline, job, H200).worst(layout)


def test_the_stages_of_a_pipeline_together_hold_the_release_to_the_byte(k3: Outline) -> None:
    model = MemoryModel(k3, lora(k3), H200)
    for pp in (1, 4, 8, 16):
        layout = Layout(Degrees(pp=pp), split(k3, pp), "dedup", resident=True)
        base = sum(memory.lines["base_weights"] for memory in model.of_layout(layout))
        assert base == 1_560_860_324_864


def test_twelve_layers_on_eight_expert_ranks_are_what_a_published_run_holds(k3: Outline) -> None:
    # 64 GB300: TP4 PP8 CP2 EP8, base in BF16; 92.3 GB by arithmetic, about 91 GB printed.
    job = lora(k3, base_dtype="bf16")
    degrees = Degrees(pp=8, cp=2, tp=4, ep=8)
    stages = MemoryModel(k3, job, H200).of_layout(Layout(degrees, split(k3, 8), "flat", True))
    counts = [stage.num_layers for stage in split(k3, 8)]
    assert counts == [12] * 7 + [9]
    assert stages[3].lines["base_weights"] == pytest.approx(92.3e9, rel=0.03)


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "seq", "peak"),
    [(1, 2, 1, 4096, 66.552), (2, 1, 1, 4096, 60.680), (8, 1, 1, 4096, 28.286),
     (2, 1, 4, 32768, 68.428), (1, 1, 8, 131072, 147.988)],
)
def test_published_peaks_of_dense_training(tp: int, pp: int, cp: int, seq: int, peak: float) -> None:
    outline = load_outline(LLAMA_70B)
    degrees = Degrees(pp=pp, dp_shard=8 // (tp * pp * cp), cp=cp, tp=tp)
    job = Job(method="full", stack=MEGATRON, seq_len=seq, global_batch=4 * degrees.dp_shard,
              recompute=Recompute("none"), routing=1.0)
    found = worst(outline, job, degrees).allocated / 2**30
    assert found == pytest.approx(peak, rel=0.004)


def test_published_peak_of_expert_parallel_training() -> None:
    outline = load_outline(DEEPSEEK_V3)
    job = Job(method="full", stack=MEGATRON, seq_len=4096, global_batch=32,
              recompute=Recompute("none"), routing=1.0)
    found = worst(outline, job, Degrees(dp_shard=8, ep=8)).allocated / 2**30
    assert found == pytest.approx(104.301, rel=0.01)


def test_lines_sum_to_the_total(k3: Outline) -> None:
    memory = worst(k3, lora(k3), Degrees(dp_shard=8, ep=8))
    assert memory.total == pytest.approx(sum(memory.lines.values()))
    outside = memory.lines["communication"] + memory.lines["context"]
    assert memory.total == pytest.approx(memory.reserved + outside)


def test_a_frozen_matrix_does_not_keep_its_input(k3: Outline) -> None:
    few = lora(k3, adapters=choose_adapters(k3, 32, ("o_proj",), "none"), recompute=Recompute("none"))
    many = lora(k3, recompute=Recompute("none"))
    thin = lora(k3, adapters=choose_adapters(k3, 1, ("attention",), "none"),
                recompute=Recompute("none"))
    degrees = Degrees(dp_shard=8, ep=8)
    kept = [worst(k3, job, degrees).lines["kept_activations"] for job in (few, many, thin)]
    # Fewer targets keep less; a smaller rank does not.
    assert kept[0] < kept[1] == kept[2]


def test_recomputation_keeps_one_input_a_layer(k3: Outline) -> None:
    memory = worst(k3, lora(k3, seq_len=4096), Degrees(dp_shard=8, ep=8))
    assert memory.lines["kept_activations"] == 93 * 2 * 7168 * 4096
    assert memory.lines["recomputed_layer"] > 0


def test_a_packed_base_is_counted_packed(k3: Outline) -> None:
    degrees = Degrees(dp_shard=16, ep=16)
    native, bf16 = (
        worst(k3, lora(k3, base_dtype=dtype), degrees).lines["base_weights"]
        for dtype in ("native", "bf16")
    )
    experts = 2_722_740_830_208 / 16
    assert bf16 - native == pytest.approx(experts * (2 - 0.53125), rel=1e-3)


def test_imbalance_costs_memory_and_capacity_bounds_it(k3: Outline) -> None:
    degrees = Degrees(dp_shard=64, ep=64)
    totals = [
        worst(k3, lora(k3, routing=load, capacity_factor=cap), degrees).total
        for load, cap in ((1.0, None), (1.6, None), (1.6, 1.0))
    ]
    assert totals[0] == totals[2] < totals[1]


def test_no_stage_begins_with_a_layer_that_takes_another_ones_selection() -> None:
    outline = load_outline(preset_config("glm-5-tiny"))
    for pp in (2, 3):
        for stage in split(outline, pp)[1:]:
            indexer = getattr(outline.layers[stage.first].mixer, "indexer", None)
            assert indexer is None or indexer.share == "full"


GPT: dict[str, object] = {
    "model_type": "megatron_gpt", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 2048, "vocab_size": 50304, "tie_word_embeddings": True, "learned_positions": 1024,
    "gated_mlp": False, "mlp_bias": True, "attention_bias": True, "attention_out_bias": True,
    "norm_bias": True,
}


def test_a_plain_gpt_has_the_parameters_of_its_formula() -> None:
    d = 512
    layer = 12 * d * d + 13 * d  # Korthikanti et al.: 4 d^2 + 4 d, 8 d^2 + 5 d, two norms
    outline = load_outline(GPT)
    assert outline.total_parameters == (50304 + 1024) * d + 4 * layer + 2 * d
    experts = load_outline(GPT | {"mlp_bias": False, "num_experts": 4, "num_experts_per_tok": 1})
    routed = sum(p.numel for p in experts.params if p.owner == "routed_expert")
    assert routed == 4 * 4 * 2 * d * 2048


@pytest.mark.parametrize(("change", "per_token"), [
    ({}, 0), ({"attention": "plain"}, 8 * (2 * 1024 - 4)),
    ({"dropout": True}, 2 * 512), ({"attention": "plain", "dropout": True}, 8 * (5 * 1024 - 4) + 2 * 512),
])
def test_plain_attention_keeps_its_weights_and_dropout_its_masks(
    change: dict[str, object], per_token: int
) -> None:
    outline = load_outline(GPT)
    job = Job(method="full", seq_len=1024, micro_batch=1, global_batch=1, recompute=Recompute("none"),
              stack=MEGATRON)
    kept = [worst(outline, replace(job, **each), Degrees()).lines["kept_activations"]  # type: ignore[arg-type]
            for each in ({}, change)]
    assert kept[1] - kept[0] == 4 * 1024 * per_token


def test_tensor_parallel_experts_are_divided_and_what_every_rank_keeps_is_not() -> None:
    outline = load_outline(GPT | {"num_experts": 4, "num_experts_per_tok": 1})
    job = Job(method="full", seq_len=1024, global_batch=4, recompute=Recompute("none"), stack=MEGATRON,
              routing=1.0)
    whole = worst(outline, job, Degrees(dp_shard=2, tp=2, ep=2)).lines
    divided = worst(outline, job, Degrees(dp_shard=2, tp=2, ep=2, etp=2)).lines
    routed = sum(p.numel for p in outline.params if p.owner == "routed_expert")
    assert whole["base_weights"] - divided["base_weights"] == 2 * routed / 4
    # Every one of the tp ranks receives the rows of all of them, and half the channels.
    assert divided["kept_activations"] - whole["kept_activations"] == pytest.approx(
        4 * 512 * (2 * 512 + 12)
    )
    every = worst(outline, replace(job, stack=replace(MEGATRON, shards="none")), Degrees(dp_shard=8))
    assert every.lines["moments"] == 8 * outline.total_parameters


def test_muon_deals_out_whole_parameters_so_that_one_rank_has_a_table() -> None:
    outline = load_outline(GPT | {"tie_word_embeddings": False})
    table, rest = 50304 * 512, outline.total_parameters - 2 * 50304 * 512
    job = Job(method="full", seq_len=64, global_batch=8, optimizer="muon", stack=MEGATRON)
    lines = worst(outline, job, Degrees(dp_shard=8)).lines
    assert (lines["masters"], lines["moments"]) == (4 * table, 8 * table)
    # Where every rank has all, matrices of layers have one moment.
    alone = worst(outline, job, Degrees()).lines
    assert alone["masters"] == 4 * outline.total_parameters
    matrices = sum(p.numel for p in outline.params if p.layer is not None and len(p.shape) > 1)
    assert alone["moments"] == pytest.approx(8 * (2 * table + rest) - 4 * matrices)


def test_a_plain_loss_keeps_copies_of_all_logits() -> None:
    outline = load_outline(GPT)
    job = Job(method="full", seq_len=4096, global_batch=1, stack=MEGATRON)
    plain = replace(job, stack=replace(MEGATRON, loss_in_place=False, logit_bytes=14))
    fused, more = (worst(outline, each, Degrees()).lines["logits"] for each in (job, plain))
    assert more - fused == (14 - 2) * 4096 * 50304 - 2 * 50304 * 512


def test_recomputing_attention_saves_nothing_of_the_input_of_a_trained_projection() -> None:
    # Published: 36.618 without and 36.614 with it, where products are in bf16.
    outline = load_outline(GPT)
    job = Job(method="full", seq_len=1024, micro_batch=1, global_batch=1, recompute=Recompute("none"),
              stack=MEGATRON)
    again = Recompute("none", frozenset({"core_attn"}))

    def kept(**values: object) -> float:
        each = replace(job, **values)  # type: ignore[arg-type]
        return worst(outline, each, Degrees()).lines["kept_activations"] / 4 / 1024

    assert kept() - kept(recompute=again) == 4 * 8  # the sums of the softmax
    # Narrow products keep a copy of their own.
    assert kept(precision="fp8") - kept(precision="fp8", recompute=again) == 4 * 8 + 2 * 512


def test_divided_parameters_are_gathered_in_the_precision_of_products() -> None:
    outline = load_outline(GPT)
    job = Job(method="full", seq_len=64, global_batch=8, stack=FSDP)
    layer = sum(p.numel for p in outline.params if p.layer == 0)
    assert worst(outline, job, Degrees(dp_shard=8), resident=False).lines["gathered_parameters"] == (
        2 * 2 * layer
    )


def test_a_pipeline_of_divided_parameters_keeps_them_whole_for_the_step() -> None:
    outline = load_outline(GPT | {"tie_word_embeddings": False})
    job = Job(method="full", seq_len=64, global_batch=16, stack=FSDP)
    layout = Layout(Degrees(pp=2, dp_shard=4), split(outline, 2))
    lines = MemoryModel(outline, job, H200).of_layout(layout)[-1].lines
    again = replace(job, global_batch=32)
    more = MemoryModel(outline, again, H200).of_layout(layout)[-1].lines
    here = sum(p.numel for p in outline.params if p.owner == "head" or (p.layer or 0) > 1) + 2 * 512
    assert lines["gathered_parameters"] == 2 * here
    assert lines["gradients"] == 4 * here * (1 + 1 / 4)
    # Twice the micro-batches, four more outputs in bf16.
    assert more["logits"] - lines["logits"] == 4 * 64 * 50304 * 2


def test_offloaded_moments_leave_their_masters_on_the_device() -> None:
    # Published: 47.2, 43.4, 39.6, 35.6 and 32.0 GB for 0 to 100%, two thirds of the optimizer's state.
    outline = load_outline(GPT)
    job = Job(method="full", seq_len=64, global_batch=8, stack=MEGATRON, offload_optimizer=0.25)
    memory = worst(outline, job, Degrees())
    n = outline.total_parameters
    assert (memory.lines["moments"], memory.lines["masters"]) == (0.75 * 8 * n, 4 * n)
    assert memory.host == 0.25 * 12 * n
