"""LoRA training steps: Trimtab beside transformers + peft, in one process, as ratios.

    python -m benchmarks.lora_step --out benchmarks/results/lora_step_cpu_202612.jsonl

Both sides train a rank-16 adapter on the attention projections of the same checkpoint with the same
tokens, in float32 with AdamW. Before anything is timed, first loss and gradient norm of both sides
must agree (the correctness gate). Then the sides take turns; memory is that of fresh processes.

Models: `kimi-linear-224m` (8 layers, width 512, 64 experts, 8 active), `glm5-next-tiny`, and for the
long step `k3.1-tiny`, which transformers does not have.

The peers must not find `fla` on a machine without an accelerator: the import is blocked here.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import MIB, Result
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.models.context import ForwardContext
from trimtab.models.lora import inject, lora_parameters
from trimtab.models.tape import ChoiceTape
from trimtab.train.allocator import give_blocks_back
from trimtab.train.step import clip_gradients

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, ALPHA, LR = 16, 32, 1e-4
GATE = 1e-4  # relative difference of first loss and gradient norm
# (model, sequences, length, layers recomputed in the backward pass)
CASES = (
    ("kimi-linear-224m", 1, 1024, False),
    ("kimi-linear-224m", 4, 1024, True),
    ("glm5-next-tiny", 4, 1024, True),
)
LONG = ("k3.1-tiny", 1, 32768, True)
Step = Callable[[], tuple[float, float]]


def config_of(model: str) -> dict[str, Any]:
    """config.json of a preset, or of the 224M-parameter Kimi Linear."""
    if model != "kimi-linear-224m":
        return preset_config(model)
    config = preset_config("kimi-linear-tiny")
    config.update(
        vocab_size=32768, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_key_value_heads=8, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, moe_intermediate_size=256, num_shared_experts=1,
    )
    config["linear_attn_config"] = {**config["linear_attn_config"], "num_heads": 8, "head_dim": 64}
    return config


def checkpoint(model: str, folder: str) -> Path:
    """A random checkpoint in the released format, made once per folder."""
    path = Path(folder) / model
    if not path.exists():
        config = config_of(model)
        init_checkpoint(load_arch(config, model), config, path, seed=1)
    return path


def tokens(sequences: int, length: int) -> torch.Tensor:
    """[sequences, length] ids that every preset has."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (sequences, length), generator=generator)


def trimtab_step(folder: str, model_name: str, sequences: int, length: int, recompute: bool) -> Step:
    """One step of ours; returns mean token loss and gradient norm."""
    give_blocks_back()  # as a run does
    model, arch = load_model(
        checkpoint(model_name, folder), base_dtype="fp32", compute_dtype=torch.float32, vision=False
    )
    targets = resolve_targets(arch, target_modules=TARGETS, rank=RANK, alpha=ALPHA, dropout=0.0)
    inject(model, targets, seed=1)
    parameters = list(lora_parameters(model).values())
    _same_start(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    ids = tokens(sequences, length)
    flat, keep = ids.flatten(), torch.ones_like(ids, dtype=torch.bool)
    keep[:, -1] = False
    rows = keep.flatten().nonzero().squeeze(1)

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        context = ForwardContext.packed(
            [length] * sequences, tape=ChoiceTape() if recompute else None, recompute=recompute
        )
        hidden = model(flat, context)
        loss = model.token_losses(hidden[rows], flat[rows + 1]).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        norm = clip_gradients(parameters, None)
        optimizer.step()
        return loss.item(), norm

    return step


def peer_step(folder: str, model_name: str, sequences: int, length: int, recompute: bool) -> Step:
    """One step of transformers + peft; returns mean token loss and gradient norm."""
    for name in ("fla", "causal_conv1d", "kernels"):
        sys.modules[name] = None  # type: ignore[assignment]
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    path = checkpoint(model_name, folder)
    auto = AutoModelForImageTextToText if "glm5" in model_name else AutoModelForCausalLM
    base = auto.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    # Tower and projector have projections of the same names; ours adapts the language model only.
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS,
                        exclude_modules=r".*visual.*")
    model = get_peft_model(base, config)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    _same_start(trained)
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    ids = tokens(sequences, length)

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = clip_gradients(trained, None)
        optimizer.step()
        return loss.item(), norm

    return step


@torch.no_grad()
def _same_start(parameters: list[torch.nn.Parameter]) -> None:
    """Adapters that both sides begin with: values by place only, B not zero, so that all gradients count."""
    for parameter in parameters:
        rows, width = parameter.shape
        grid = torch.arange(rows).unsqueeze(1) * 7 + torch.arange(width) * 3
        parameter.copy_(torch.sin(grid.to(parameter.dtype)) * 0.01)


def compare(folder: str, case: tuple[str, int, int, bool], runs: int, peer_runs: int) -> list[Result]:
    """Results of one model and batch."""
    model, sequences, length, recompute = case
    label = f"{model} {sequences}x{length}" + (", layers recomputed" if recompute else "")
    ours, peer = (make(folder, *case) for make in (trimtab_step, peer_step))
    (loss, norm), (peer_loss, peer_norm) = ours(), peer()
    gap = max(abs(loss / peer_loss - 1), abs(norm / peer_norm - 1))
    if not gap <= GATE:
        raise SystemExit(
            f"correctness gate: {label}: loss {loss} and {peer_loss}, norm {norm} and {peer_norm}"
        )
    peer_times = harness.interleave({"peer": peer}, peer_runs, warmup=0)["peer"]
    times = harness.interleave({"ours": ours}, runs, warmup=0)["ours"]
    flops, floor = flop_floor(ours)
    shares = op_shares(ours)
    del ours, peer
    memory = harness.peak_extra_bytes(trimtab_step, folder, *case)
    peer_memory = harness.peak_extra_bytes(peer_step, folder, *case)
    details = {
        "step_s": round(times.median, 4), "peer_step_s": round(peer_times.median, 4),
        "tokens_per_second": round(sequences * length / times.median, 1), "runs": runs,
        "peer_runs": peer_runs, "loss": loss, "peer_loss": peer_loss, "grad_norm": norm,
        "peer_grad_norm": peer_norm, "memory_mib": round(memory / MIB), "gflop": round(flops / 1e9, 1),
        "peer_memory_mib": round(peer_memory / MIB), "op_shares": shares,
    }
    goal = 5.0 if recompute else None
    return [
        Result(label, "tokens/s over transformers + peft", peer_times.median / times.median, goal,
               details=details),
        Result(label, "extra memory over theirs", memory / peer_memory, 0.6 if recompute else None,
               at_least=False),
        Result(label, "floor of its operations / time", floor / times.median,
               0.5 if model == "kimi-linear-224m" else None),
    ]


def flop_floor(step: Step) -> tuple[int, float]:
    """Operations of one step, and the seconds they take at this machine's matrix product rate."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    flops = counter.get_total_flops()
    return flops, flops / harness.sgemm_rate()


def op_shares(step: Step, top: int = 8) -> dict[str, float]:
    """Share of the step's own CPU time by operator, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:top]}


def long_step(folder: str) -> list[Result]:
    """A step over one sequence of 32,768 tokens."""
    model, sequences, length, recompute = LONG
    memory = harness.peak_extra_bytes(trimtab_step, folder, *LONG)
    label = f"{model} {sequences}x{length}, layers recomputed"
    return [Result(label, "extra memory (GiB)", memory / 2**30, 4.0, at_least=False,
                   details={"recompute": recompute})]


def main() -> int:
    """Parse the command line; 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON lines file that rows are added to")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer-runs", type=int, default=1, help="theirs take minutes")
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))))
    parser.add_argument("--long", action="store_true", help="also the step of 32,768 tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="trimtab-lora-step-")
    missed = 0
    try:
        for work in [lambda c=CASES[i]: compare(folder, c, args.runs, args.peer_runs) for i in args.cases] + (
            [lambda: long_step(folder)] if args.long else []
        ):
            results = work()
            for result in results:
                print(result.as_line(), flush=True)
                missed += not result.passed
            if args.out:
                harness.append_rows(args.out, "lora_step", [result.as_row() for result in results])
    finally:
        shutil.rmtree(folder)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
