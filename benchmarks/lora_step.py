"""LoRA training steps: Trimtab beside transformers + peft, in one process, as ratios.

    python -m benchmarks.lora_step --long --out benchmarks/results/lora_step_cpu_202612.jsonl

Both sides train a rank-16 adapter on the attention projections of the same checkpoint with the same
tokens, in float32 with AdamW; theirs with gradient checkpointing, ours with every form of
recomputation. Before anything is timed, loss and gradient norm of all must agree (the correctness
gate). Then the sides take turns on one thread, timed by the clock of the process, which on a machine
with other work gives what the wall clock gives on an idle one. Memory is that of fresh processes.

Models: `kimi-linear-224m` (8 layers, width 512, 64 experts, 8 active), `glm5-next-tiny`, and for the
long step `k3.1-tiny`, which transformers does not have.

The floor is the time that the products of one step, layers not recomputed, take at the speed of a
square product on the same thread.

The peers must not find `fla` on a machine without an accelerator: the import is blocked here.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness
from benchmarks.harness import MIB, Result
from benchmarks.op_time import op_shares
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import BaseDtype, load_model
from trimtab.models.context import ForwardContext, Recompute
from trimtab.models.lora import inject, lora_parameters
from trimtab.models.tape import ChoiceTape
from trimtab.train.allocator import give_blocks_back
from trimtab.train.step import clip_gradients

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, ALPHA, LR = 16, 32, 1e-4
CASES = (("kimi-linear-224m", 4, 1024), ("glm5-next-tiny", 4, 1024))  # model, sequences, length
# Relative difference of loss and gradient norm. In float32 sparse attention keeps other keys where
# scores are nearly equal, so the strict comparison is in float64.
GATES = {
    "kimi-linear-224m": ((torch.float32, 1e-4),),
    "glm5-next-tiny": ((torch.float64, 1e-6), (torch.float32, 5e-3)),
}
LONG = ("k3.1-tiny", 1, 32768, "layer")
SPEED, MEMORY, FLOOR, LONG_GIB = 5.0, 0.6, 0.5, 4.0
# One step from the present adapter, which moves only if asked: mean token loss, gradient norm.
Step = Callable[[bool], tuple[float, float]]


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


def trimtab_steps(
    folder: str, model_name: str, sequences: int, length: int, dtype: torch.dtype = torch.float32
) -> Callable[[Recompute], Step]:
    """Our side: what gives a step for each form of recomputation."""
    give_blocks_back()  # as a run does
    base: BaseDtype = "fp64" if dtype is torch.float64 else "fp32"
    model, arch = load_model(
        checkpoint(model_name, folder), base_dtype=base, compute_dtype=dtype, vision=False
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

    def step(recompute: Recompute, update: bool) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        tape = None if recompute == "none" else ChoiceTape()
        context = ForwardContext.packed([length] * sequences, tape=tape, recompute=recompute)
        hidden = model(flat, context)
        loss = model.token_losses(hidden[rows], flat[rows + 1]).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        norm = clip_gradients(parameters, None)
        if update:
            optimizer.step()
        return loss.item(), norm

    return lambda recompute: lambda update: step(recompute, update)


def peer_step(
    folder: str, model_name: str, sequences: int, length: int, dtype: torch.dtype = torch.float32
) -> Step:
    """A step of transformers + peft with gradient checkpointing."""
    for name in ("fla", "causal_conv1d", "kernels"):
        sys.modules[name] = None  # type: ignore[assignment]
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    path, images = checkpoint(model_name, folder), "glm5" in model_name
    auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
    # Their grouped products do not know float64.
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    base = auto.from_pretrained(path, dtype=dtype, trust_remote_code=False, **experts)
    # Tower and projector have projections of the same names; ours adapts the language model only.
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS,
                        exclude_modules=r".*visual.*" if images else None)
    model = get_peft_model(base, config)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    _same_start(trained)
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    ids = tokens(sequences, length)

    def step(update: bool) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = clip_gradients(trained, None)
        if update:
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


def compare(folder: str, case: tuple[str, int, int], runs: int, once: bool) -> list[Result]:
    """Results of one model and batch, which it prints as tables."""
    model, sequences, length = case
    label = f"{model} {sequences}x{length}"
    losses = {}
    for dtype, limit in GATES[model]:
        losses = gate(f"{label} {dtype}", limit, both_sides(folder, *case, dtype))
    steps = both_sides(folder, *case)
    sides = {name: lambda s=step: s(True) for name, step in steps.items()}
    times = harness.interleave(
        sides, runs, warmup=0, once=frozenset({"peer"} if once else ()), clock=time.process_time
    )
    flops, rate = count_flops(steps["none"]), harness.sgemm_rate(clock=time.process_time)
    shares = {name: op_shares(sides[name]) for name in ("none", "selective")}
    del steps, sides
    memory = {"peer": harness.peak_extra_bytes(peer_step_once, folder, *case)}
    for form in get_args(Recompute):
        memory[form] = harness.peak_extra_bytes(trimtab_step_once, folder, *case, form)
    found: list[Result] = []
    for form in get_args(Recompute):
        seconds, theirs = times[form].median, times["peer"].median
        details = {
            "step_cpu_s": round(seconds, 4), "peer_step_cpu_s": round(theirs, 4), "runs": runs,
            "peer_runs": len(times["peer"].seconds),
            "tokens_per_second": round(sequences * length / seconds, 1),
            "memory_mib": round(memory[form] / MIB), "peer_memory_mib": round(memory["peer"] / MIB),
            "loss": losses[form][0], "peer_loss": losses["peer"][0], "grad_norm": losses[form][1],
            "peer_grad_norm": losses["peer"][1], "gflop": round(flops / 1e9, 1),
            "gflop_per_second": round(rate / 1e9, 1), "op_shares": shares.get(form),
        }
        name = f"{label} recompute {form}"
        least = FLOOR if model == "kimi-linear-224m" else None
        found += [
            Result(name, "tokens/s over transformers + peft", theirs / seconds, SPEED, details=details),
            Result(name, "extra memory over theirs", memory[form] / memory["peer"],
                   MEMORY if form != "none" else None, at_least=False),
            Result(name, "floor of its products / time", flops / rate / seconds, least),
        ]
    show_table(label, times, memory, losses, sequences * length, flops / rate)
    for form, parts in shares.items():
        show_shares(f"{label}, recompute {form}", parts)
    return found


def both_sides(
    folder: str, model: str, sequences: int, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, Step]:
    """Theirs, and ours by form of recomputation."""
    peer = peer_step(folder, model, sequences, length, dtype)
    forms = trimtab_steps(folder, model, sequences, length, dtype)
    return {"peer": peer, **{form: forms(form) for form in get_args(Recompute)}}


def gate(label: str, limit: float, steps: dict[str, Step]) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm of every side, which must agree."""
    with lowest_wins():
        found = {name: step(False) for name, step in steps.items()}
    for name, values in found.items():
        for what, one, two in zip(("loss", "gradient norm"), values, found["peer"], strict=True):
            if not abs(one / two - 1) <= limit:
                raise SystemExit(f"correctness gate: {label}: {what} {one} ({name}) and {two} (peer)")
    return found


@contextmanager
def lowest_wins() -> Iterator[None]:
    """Top-k takes the lowest position of equal values, as Trimtab defines it.

    Index scores are sums of rectified products, many exactly 0, of which `torch.topk` takes any.
    """
    method, values = torch.Tensor.topk, torch.return_types.topk

    def topk(x: torch.Tensor, k: int, dim: int = -1, **_: bool) -> Any:
        ordered = torch.sort(x, dim=dim, descending=True, stable=True)
        return values([each.narrow(dim, 0, k) for each in ordered])

    torch.Tensor.topk = topk  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.topk = method  # type: ignore[method-assign]


def trimtab_step_once(
    folder: str, model: str, sequences: int, length: int, recompute: Recompute
) -> Callable[[], object]:
    """A step, prepared for the measurement of its memory."""
    step = trimtab_steps(folder, model, sequences, length)(recompute)
    return lambda: step(True)


def peer_step_once(folder: str, model: str, sequences: int, length: int) -> Callable[[], object]:
    """As `trimtab_step_once`, for the other side."""
    step = peer_step(folder, model, sequences, length)
    return lambda: step(True)


def count_flops(step: Step) -> int:
    """Operations of the products of one step."""
    with FlopCounterMode(display=False) as counter:
        step(False)
    return int(counter.get_total_flops())


def show_table(
    label: str, times: dict[str, harness.Timing], memory: dict[str, int],
    losses: dict[str, tuple[float, float]], count: int, floor: float,
) -> None:
    """Every side in a line."""
    theirs = times["peer"].median
    print(f"\n{label}, one thread\n{'':<34}{'CPU s/step':>12}{'tokens/s':>10}{'ratio':>8}"
          f"{'extra MiB':>11}{'ratio':>8}{'floor/time':>12}{'loss':>12}{'grad norm':>11}")
    for name, timing in times.items():
        seconds, (loss, norm) = timing.median, losses[name]
        shown = "transformers + peft, checkpointing" if name == "peer" else f"Trimtab, recompute {name}"
        print(f"{shown:<34}{seconds:>12.3f}{count / seconds:>10.1f}{theirs / seconds:>7.2f}x"
              f"{memory[name] / MIB:>11.0f}{memory[name] / memory['peer']:>7.2f}x"
              f"{floor / seconds:>12.0%}{loss:>12.6f}{norm:>11.6f}")


def show_shares(title: str, shares: dict[str, float]) -> None:
    """Share of the time of each operator."""
    print(f"\n{title}: share of the time")
    for name, share in shares.items():
        print(f"  {name:<30}{share:>7.1%}")


def long_step(folder: str) -> list[Result]:
    """A step over one sequence of 32,768 tokens; the bytes of the whole process count."""
    model, sequences, length, form = LONG
    begin, peak = harness.peak_bytes(trimtab_step_once, folder, *LONG)
    label = f"{model} {sequences}x{length} recompute {form}"
    details = {"extra_mib": round((peak - begin) / MIB)}
    return [Result(label, "peak memory (GiB)", peak / 2**30, LONG_GIB, at_least=False, details=details)]


def main() -> int:
    """Parse the command line; 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON lines file that rows are added to")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="time theirs once, which takes minutes")
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))))
    parser.add_argument("--long", action="store_true", help="also the step of 32,768 tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="trimtab-lora-step-")
    found: list[Result] = []
    try:
        for index in args.cases:
            found += compare(folder, CASES[index], args.runs, args.once)
        if args.long:
            found += long_step(folder)
    finally:
        shutil.rmtree(folder)
    print()
    for result in found:
        print(result.as_line())
    if args.out:
        harness.append_rows(args.out, "lora_step", [result.as_row() for result in found])
    return int(any(not result.passed for result in found))


if __name__ == "__main__":
    sys.exit(main())
