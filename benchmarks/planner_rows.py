"""Rows of a table of published runs, as questions to the planner.

Knows: the columns of `published_runs.csv` (its head describes them) and how frameworks name models,
recomputation and dispatchers. A row that cannot be expressed is skipped with the reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner_goldens import (
    between_steps,
    golden_degrees,
    golden_job,
    golden_of,
    of_only_step,
    padded_config,
)
from benchmarks.planner_table import degree, faults, number
from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import Cluster, Graded, load_cluster
from trimtab.errors import TrimtabError
from trimtab.plan.job import (
    FSDP,
    MEGATRON,
    PLAIN_LOGIT_BYTES,
    Adapters,
    Dispatcher,
    ExpertAdapters,
    Job,
    Precision,
    Recompute,
    choose_adapters,
)
from trimtab.plan.memory import Layout, MemoryModel, StageMemory
from trimtab.plan.placement import Degrees
from trimtab.plan.planner import BANDS
from trimtab.plan.stages import split
from trimtab.plan.timing import TimeModel

MODELS = Path(__file__).with_name("planner_models.json")

# Hardware of a row, by what its name begins with -> preset, memory in GiB where it differs.
HARDWARE: tuple[tuple[str, str, float | None], ...] = (
    ("H100-96GB", "h100", 95.0), ("H100", "h100", None), ("H800", "h800", None),
    ("H200", "h200", None), ("H20-", "h100", 95.0), ("GB200", "gb200-nvl72", None),
    ("GB300", "gb300-nvl72", None), ("B200", "b200", None), ("B300", "b300", None),
    ("MI355X", "mi355x", None), ("MI300X", "mi300x", None), ("A800", "a100", None),
    ("A100", "a100", None), ("Ascend A3", "ascend-a3", None), ("Ascend A2", "ascend-a2", None),
)
# Names without a usable id -> id in MODELS.
NAMES: dict[str, str] = {
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B", "qwen3.5-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B", "kimi k2": "moonshotai/Kimi-K2-Instruct",
    "llama3 70b": "meta-llama/Meta-Llama-3-70B", "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3-8b": "meta-llama/Llama-3.1-8B", "qwen2.5 7b": "Qwen/Qwen2.5-7B",
    "qwen2.5 32b": "Qwen/Qwen2.5-32B", "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3", "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B", "glm-4.5-air": "ZhipuAI/GLM-4.5-Air",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B", "qwen3-vl-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-4b": "Qwen/Qwen3-4B", "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "llama3.1-405b": "meta-llama/Llama-3.1-405B",
    "kimi-k2-thinking": "moonshotai/Kimi-K2-Instruct",
    # Models with towers, of which the text model is planned.
    "qwen3-vl-8b": "Qwen/Qwen3-8B", "qwen2.5-vl-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-omni-7b": "Qwen/Qwen2.5-7B", "qwen3-omni-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "internvl3_5-30b-a3b": "Qwen/Qwen3-30B-A3B", "glm-4.6v": "ZhipuAI/GLM-4.5-Air",
}


class Skip(Exception):  # noqa: N818  # a reason, not a failure
    """Why a row is not predicted."""


@dataclass(frozen=True, slots=True)
class Case:
    """A published run and what the planner says of it.

    Args:
        row: the columns.
        block: of the table of results.
        is_test: held out: nothing was chosen by it.
        memory: predicted peaks, None where the layout is not known.
        seconds: predicted step, None where batch or layout is not known.
        measured_memory: bytes.
        is_reserved: the reading is of reserved memory.
        measured_seconds: of a step.
        capacity: device memory in bytes.
    """

    row: Mapping[str, str]
    block: str
    is_test: bool
    memory: StageMemory | None
    seconds: float | None
    measured_memory: float | None
    is_reserved: bool
    measured_seconds: float | None
    capacity: float


def is_test(row: Mapping[str, str]) -> bool:
    """Whether a row is held out.

    Always: LoRA and frozen bases, natural routing, ROCm. Of the rest, the groups whose hash is odd.
    """
    framework, routing = row["framework"], row["routing"]
    if row["lora"] or "lora" in row["task"] or "ROCm" in framework or "natural" in routing:
        return True
    return hashlib.sha256(row["group"].encode()).digest()[0] % 2 == 1


def test_groups_hash(rows: list[dict[str, str]]) -> tuple[int, str]:
    """Number of held-out groups and the SHA-256 of their sorted list."""
    groups = sorted({row["group"] for row in rows if is_test(row)})
    return len(groups), hashlib.sha256("\n".join(groups).encode()).hexdigest()


def block_of(row: Mapping[str, str]) -> str:
    """The block of the results that a row belongs to."""
    framework = row["framework"]
    if row["lora"] or "lora" in row["task"]:
        return "LoRA"
    for mark, block in (
        ("SimuMax", "SimuMax B200"), ("golden", "CI goldens"), ("ROCm", "K3 on ROCm"),
        ("card", "Bridge cards"), ("ModelZoo", "ModelZoo"), ("Pai-Megatron", "H800 sweep"),
        ("torchtitan", "torchtitan"), ("AutoModel", "AutoModel"), ("ms-swift", "ms-swift"),
        ("moe_perf", "single layer"),
    ):
        if mark in framework:
            return block
    if re.match(r"Megatron-Bridge 2\d\.\d\d", framework):
        return "Bridge tables"
    return "Bridge studies" if framework == "Megatron-Bridge" else "other"


def outline_for(row: Mapping[str, str], models: Mapping[str, object]) -> Outline:
    """The model of a row, cut to its number of layers.

    Raises:
        Skip: no configuration of it is at hand.
    """
    if golden := golden_of(row):
        return load_outline(padded_config(golden, degree(row, "tp")))
    if row["model"].startswith("mcore-test:") and not row["n_dev"]:
        raise Skip("the number of devices is not published")
    found = models.get(row["hf_id"])
    if found is None:
        text = row["model"].lower()
        key = next((name for name in NAMES if text.startswith(name)), None)
        found = models.get(NAMES[key]) if key else None
    if found is None:
        raise Skip("no configuration of the model")
    config = preset_config(found) if isinstance(found, str) else dict(found)  # type: ignore[call-overload]
    if "ROCm" in row["framework"]:
        # These runs build the text model alone.
        outline = load_outline(_cut(config, row))
        params = tuple(p for p in outline.params if p.owner not in ("vision", "projector"))
        return replace(outline, params=params)
    return load_outline(_cut(config, row))


def _cut(config: dict[str, object], row: Mapping[str, str]) -> dict[str, object]:
    layers, text = number(row, "layers"), config
    if "text_config" in config:
        text = dict(config["text_config"])  # type: ignore[call-overload]
        config = config | {"text_config": text}
    if experts := re.search(r"(\d+) experts", row["model"]):
        text["num_experts"] = int(experts.group(1))
    if layers is None or layers == text["num_hidden_layers"]:
        return config
    depth = int(layers)
    text["num_hidden_layers"] = depth
    if text.get("first_k_dense_replace", 0) not in (0, 1):
        # Truncated proxies of these sources keep one dense layer.
        text["first_k_dense_replace"] = 1
    text["num_nextn_predict_layers"] = 0
    if "layer_types" in text:
        text["layer_types"] = list(text["layer_types"])[:depth]  # type: ignore[call-overload]
    if isinstance(linear := text.get("linear_attn_config"), dict):
        text["linear_attn_config"] = linear | {
            key: [i for i in linear[key] if i <= depth] for key in ("kda_layers", "full_attn_layers")
        }
    return config


def cluster_for(row: Mapping[str, str]) -> Cluster:
    """The preset of a row's hardware.

    Raises:
        Skip: there is none.
    """
    for start, preset, memory in HARDWARE:
        if row["hardware"].startswith(start):
            cluster = load_cluster(preset)
            if memory is not None:
                cluster = replace(cluster, memory=Graded(memory * 2**30, "documented"))
            return cluster
    raise Skip("no preset of the hardware")


def degrees_for(row: Mapping[str, str]) -> Degrees:
    """The layout of a row.

    Raises:
        Skip: it is not published, or its degrees do not fit together.
    """
    golden = golden_of(row)
    world = number(row, "n_dev")
    if golden:
        world = golden.values.get("devices", world)
    tp, pp, cp, ep = (degree(row, key) for key in ("tp", "pp", "cp", "ep"))
    if world is None:
        raise Skip("the number of devices is not published")
    if not row["tp"] and not row["pp"] and not row["ep"]:
        raise Skip("no layout")
    data, rest = divmod(int(world), tp * pp * cp)
    if rest or data == 0 or (data * cp * tp) % ep:
        raise Skip("degrees do not fit together")
    degrees = Degrees(pp=pp, dp_shard=data, cp=cp, tp=tp, ep=ep)
    return golden_degrees(golden, degrees) if golden else degrees


def recompute_for(row: Mapping[str, str]) -> Recompute:
    """The policy that a row names."""
    text = row["recompute"]
    if "torchtitan" in row["framework"] and text.startswith("selective"):
        return Recompute("none", frozenset({"other_products"}))
    if match := re.match(r"full block (\d+)", text):
        return Recompute(int(match.group(1)))
    if text.startswith("full"):
        return Recompute("all")
    if text.startswith("selective"):
        known = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "gdn_norm_out")
        parts = {name for name in known if re.search(rf"\b{name}\b", text)}
        if "mlp" in parts:
            parts.add("mlp_act")
        if re.search(r"\bmoe\b", text):
            parts |= {"moe", "moe_act"}
        return Recompute("none", frozenset(parts or {"core_attn"}))
    return Recompute("none")


def adapters_for(outline: Outline, text: str) -> Adapters:
    """LoRA targets from the words of several tools."""
    match = re.search(r"r(\d+)", text)
    rank = int(match.group(1)) if match else 16
    leaves = {param.name.split(".")[-2] for param in outline.params if param.layer is not None}
    attention = [leaf for leaf in ("q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj",
                                   "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkvz") if leaf in leaves]
    output = [leaf for leaf in ("o_proj", "out_proj") if leaf in leaves]
    ffn = [leaf for leaf in ("gate_proj", "up_proj", "down_proj") if leaf in leaves]
    if re.search(r"all|yes|\*_proj|fc1", text) or text == f"r{rank}":
        words, experts = attention + output + ffn, "per_expert"
    else:
        words = attention + (output if "proj" in text.replace("qkv", "") or "o_proj" in text else [])
        experts = "none"
    has_experts = any(param.owner == "routed_expert" for param in outline.params)
    form: ExpertAdapters = "per_expert" if experts == "per_expert" and has_experts else "none"
    return choose_adapters(outline, rank, words, form)


def job_for(row: Mapping[str, str], outline: Outline, degrees: Degrees) -> Job:
    """The job of a row.

    Raises:
        Skip: its sequence length is not a number.
    """
    seq = 1.0 if is_steady(row) else number(row, "seq")
    if seq is None:
        raise Skip("no fixed sequence length")
    micro = int(number(row, "mbs") or 1)
    batch = int(number(row, "gbs") or micro * degrees.data)
    is_lora = bool(row["lora"]) or "lora" in row["task"]
    shards_all = "FSDP" in row["shard"] or "FSDP" in row["framework"]
    text, precision = row["model"], row["precision"]
    mtp = bool(outline.mtp) and "w/o" not in text and "no MTP" not in text
    routing = BANDS["typical" if "natural" in row["routing"] else "balanced"]
    if "ROCm" in row["framework"]:
        routing = BANDS["worst"]  # an untrained router
    if capacity := re.search(r"capacity (\d+)", row["routing"]):
        routing = float(capacity.group(1))  # experts are padded to their capacity
    chunks = degree(row, "vpp")
    if "torchtitan" in row["framework"] and degrees.pp > 1:
        # The column is the local batch, which the pipeline divides into as many micro-batches as it
        # has stages; interleaved ones have two chunks a rank at the least.
        micro = max(1, micro // degrees.pp)
        chunks = max(chunks, 1 + row["overlap_graphs"].startswith("interleaved"))
    job = Job(
        method="lora" if is_lora else "frozen" if "frozen" in row["task"] else "full",
        base_dtype="native" if precision.startswith("MXFP4 w") else "bf16",
        seq_len=int(seq), micro_batch=micro, global_batch=batch,
        adapters=adapters_for(outline, row["lora"]) if is_lora else None,
        recompute=recompute_for(row), stack=FSDP if shards_all else MEGATRON,
        optimizer="muon" if "muon" in row["optimizer"] + row["shard"] else "adam", routing=routing,
        precision=precision_for(precision), mtp=mtp,
        kernels="plain" if "KDA=eager" in row["framework"] else "fused",
        chunks=chunks,
        graphs="graph" in row["overlap_graphs"],
    )
    if golden := golden_of(row):
        return golden_job(golden, job)
    if block_of(row) == "Bridge tables" or "golden" in row["notes"]:
        # Its recipes for speed reduce gradients in bf16; its default is fp32.
        job = replace(job, stack=replace(job.stack, grad_bytes=2))
    if "ROCm" in row["framework"]:
        # Its loss is torch's on all logits in fp32 (kimi_k3/training/pretrain_kimi_k3.py).
        job = replace(job, stack=replace(job.stack, loss_in_place=False, logit_bytes=PLAIN_LOGIT_BYTES))
    if "ms-swift" in row["framework"]:
        # Its scripts ask for the fused loss of Megatron itself, which keeps fp32 beside bf16.
        job = replace(job, stack=replace(job.stack, loss_in_place=False))
    if "fused linear CE" in row["shard"]:
        job = replace(job, stack=replace(job.stack, logit_bytes=0))
    return _optimizer(job, row["optimizer"].lower())


def _optimizer(job: Job, text: str) -> Job:
    """The optimizer's precisions and its share in host memory, from the words of a row."""
    if "bf16 moments" in text:
        job = replace(job, stack=replace(job.stack, moment_bytes=4))
    if "precision-aware" in text and job.stack.master_bytes:
        # Of a master copy, what the bf16 parameter lacks.
        job = replace(job, stack=replace(job.stack, master_bytes=2))
    if share := re.search(r"offload (\d+)%|(\d+)% cpu offload", text):
        job = replace(job, offload_optimizer=int(share.group(1) or share.group(2)) / 100)
    elif "cpu offload" in text and "long ctx" not in text:
        job = replace(job, offload_optimizer=1.0)
    return job


def precision_for(text: str) -> Precision:
    """Precision of matrix products."""
    if text.startswith("NVFP4"):
        return "fp4"
    return "fp8" if text.startswith(("FP8", "MXFP8")) else "bf16"


def dispatcher_for(row: Mapping[str, str]) -> Dispatcher:
    """The dispatcher of a row; tables of the newest stacks leave it out and use their default."""
    text = row["dispatcher"].lower()
    if text.startswith(("hybridep", "deepep", "mok")):
        return "dedup"
    if text.startswith("allgather"):
        return "all_gather"
    return "dedup" if not text and "Bridge 2" in row["framework"] else "flat"


def is_steady(row: Mapping[str, str]) -> bool:
    """The reading is of what is allocated between steps."""
    return row["mem_scope"].lower().startswith("steady")


def measured_memory(row: Mapping[str, str]) -> tuple[float | None, bool]:
    """Peak bytes and whether they are of reserved memory; the allocated peak where both are given.

    Readings that are neither of a whole rank's peak nor of its state are left out.
    """
    scope = row["mem_scope"].lower()
    if row["outcome"] == "oom":
        return None, False  # the run ended before its peak
    if any(word in scope for word in ("incremental", "sum over", "one layer", "estimated", "device minus",
                                      "about 96", "derived", "after every")):
        return None, False
    unit = 2**30 if row["mem_unit"] == "GiB" else 10**9
    for key, reserved in (("mem_alloc", False), ("mem_reserved", True)):
        if (value := number(row, key)) is not None:
            return value * unit, reserved
    return None, False


def cases(rows: list[dict[str, str]], skipped: dict[str, str]) -> Iterator[Case]:
    """Predict every row that can be; reasons of the others go into `skipped` by row id."""
    models: dict[str, object] = json.loads(MODELS.read_text(encoding="utf-8"))
    for row in rows:
        try:
            if next(faults(row), None) is not None:
                raise Skip("a cell cannot be read")
            yield predict(row, models)
        except Skip as reason:
            skipped[row["id"]] = str(reason)
        except TrimtabError as error:
            skipped[row["id"]] = f"refused: {error.where}: {error.rule}"


def predict(row: Mapping[str, str], models: Mapping[str, object]) -> Case:
    """One row.

    Raises:
        Skip: it cannot be expressed.
    """
    if row["task"].startswith(("inference", "microbench", "checkpoint")):
        raise Skip("no training step of a whole model")
    if row["task"].endswith(("-dpo", "-kto", "-rm")):
        raise Skip("preference optimisation is not planned")
    if "variable length" in row["notes"]:
        raise Skip("no fixed number of tokens in a micro-batch")
    outline, cluster = outline_for(row, models), cluster_for(row)
    degrees = degrees_for(row)
    if outline.num_layers < degrees.pp:
        raise Skip("fewer layers than stages")
    job = job_for(row, outline, degrees)
    layout = Layout(degrees, split(outline, degrees.pp), dispatcher_for(row), resident=False)
    model = MemoryModel(outline, job, cluster)
    if "last rank" in row["mem_scope"]:
        memory = model.of_stage(layout, layout.stages[-1])
    else:
        memory = model.worst(layout)
    if (golden := golden_of(row)) and golden.values.get("steps") == 1:
        memory = of_only_step(memory)
    if is_steady(row):
        memory = between_steps(memory)
    seconds = None
    if row["gbs"] and row["n_dev"]:
        # DualPipe runs the exchange of one micro-batch beside the compute of another.
        overlap = "ep-overlap" in row["overlap_graphs"] or "dualpipe" in row["vpp"]
        seconds = TimeModel(outline, job, cluster, exchange_overlap=overlap).step(layout).seconds
    found, reserved = measured_memory(row)
    return Case(
        row, block_of(row), is_test(row), memory, seconds, found, reserved, measured_seconds(row),
        cluster.memory.value,
    )


def measured_seconds(row: Mapping[str, str]) -> float | None:
    """Seconds of a step, from tokens per second where only those are given."""
    seconds = number(row, "step_time_s")
    if seconds is not None:
        return seconds
    speed, batch, seq, world = (number(row, k) for k in ("tok_s_dev", "gbs", "seq", "n_dev"))
    if speed and batch and seq and world:
        return batch * seq / speed / world
    return None
