"""Routed experts beside transformers' implementations: time, memory, adapters.

D512 I256 float32, frozen experts, forward and backward to the tokens and the routing weights.
Seconds are those of the processor where one thread runs, which other work hardly changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes, sgemm_rate
from trimtab.arch.spec import ActivationSpec
from trimtab.ops.backends import build_ops
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.lora import ExpertLoRA, Layout
from trimtab.ops.moe.stored import DenseMatrices

WIDTH, INNER, RANK = 512, 256, 16
Sizes = tuple[int, int, int]
LARGE: Sizes = (64, 8, 4096)
MANY: Sizes = (896, 16, 1024)
PEERS = ("grouped_mm", "eager")
ERROR = 1e-5


def clock() -> Callable[[], float]:
    """Seconds of the processor for one thread, else of the wall clock."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def inputs(sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, ids, weights, gate_up, down for E experts, A of which each of T tokens takes."""
    experts, active, tokens = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    x = normal(tokens, WIDTH)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.topk(active)
    order = ids.argsort(-1)
    ids, weights = ids.gather(-1, order), weights.gather(-1, order)
    gate_up, down = normal(experts, 2, INNER, WIDTH) * 0.04, normal(experts, WIDTH, INNER) * 0.06
    return x.to(dtype), ids, weights.to(dtype), gate_up.to(dtype), down.to(dtype)


def ours(sizes: Sizes, name: str, layout: Layout | None = None) -> Callable[[bool], list[Tensor]]:
    """One call: forward, and backward if asked; returns the result and the gradients."""
    x, ids, weights, gate_up, down = inputs(sizes)
    x.requires_grad_()
    weights.requires_grad_()
    op = build_ops({"experts": name}).experts
    call = ExpertCall(
        x, ids, weights, DenseMatrices(gate_up), DenseMatrices(down), ActivationSpec("swiglu")
    )
    if layout is not None:
        call = replace(call, lora_gate_up=adapter(sizes, layout, 0), lora_down=adapter(sizes, layout, 1))
    return lambda backward: step(lambda: op(call), [x, weights], backward)


def adapter(sizes: Sizes, layout: Layout, which: int) -> ExpertLoRA:
    """Random A and B of gate_up (0) or down (1)."""
    experts, shared = sizes[0], layout == "shared_outer"
    A = torch.randn(*(() if shared and which == 0 else (experts,)), RANK, (WIDTH, INNER)[which]) * 0.05
    out = (2, INNER) if which == 0 else (WIDTH,)
    B = torch.randn(*(() if shared and which == 1 else (experts,)), *out, RANK) * 0.05
    return ExpertLoRA(A.requires_grad_(), B.requires_grad_(), layout, 2.0)


def peer(sizes: Sizes, name: str) -> Callable[[bool], list[Tensor]]:
    """The same call through transformers."""
    for absent in ("fla", "causal_conv1d", "kernels"):
        sys.modules.setdefault(absent, None)  # type: ignore[arg-type]
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearExperts

    x, ids, weights, gate_up, down = inputs(sizes)
    x.requires_grad_()
    weights.requires_grad_()
    config: Any = SimpleNamespace(
        num_local_experts=sizes[0], hidden_size=WIDTH, moe_intermediate_size=INNER,
        hidden_act="silu", _experts_implementation=name,
    )
    with torch.device("meta"):
        module = KimiLinearExperts(config)
    module.gate_up_proj = torch.nn.Parameter(gate_up.flatten(1, 2), requires_grad=False)
    module.down_proj = torch.nn.Parameter(down, requires_grad=False)
    return lambda backward: step(lambda: module(x, ids, weights), [x, weights], backward)


def step(forward: Callable[[], Tensor], leaves: list[Tensor], backward: bool) -> list[Tensor]:
    out = forward()
    if not backward:
        return [out]
    for leaf in leaves:
        leaf.grad = None
    out.backward(torch.ones_like(out))
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def memory_of_ours(sizes: Sizes, name: str) -> Callable[[], object]:
    run = ours(sizes, name)
    return lambda: run(True)


def memory_of_peer(sizes: Sizes, name: str) -> Callable[[], object]:
    run = peer(sizes, name)
    return lambda: run(True)


def check(sizes: Sizes) -> None:
    """Stop unless every side gives the result and the gradients of a float64 run."""
    x, ids, weights, gate_up, down = inputs(sizes, torch.float64)
    x.requires_grad_()
    weights.requires_grad_()
    call = ExpertCall(
        x, ids, weights, DenseMatrices(gate_up), DenseMatrices(down), ActivationSpec("swiglu")
    )
    op = build_ops({"experts": "grouped"}).experts
    exact = step(lambda: op(call), [x, weights], True)
    sides = {"native": ours(sizes, "native"), "grouped": ours(sizes, "grouped")}
    sides.update({name: peer(sizes, name) for name in PEERS})
    for name, run in sides.items():
        for found, expected in zip(run(True), exact, strict=True):
            exact_values = expected.detach()
            difference = found.detach().double() - exact_values
            error = float(difference.abs().max() / exact_values.abs().max())
            if error > ERROR:
                raise SystemExit(f"{name} {sizes}: relative error {error:.1e} above {ERROR:.0e}")


def frozen(sizes: Sizes, least: float, least_of_best: float, runs: int) -> list[Result]:
    """Time and memory beside transformers."""
    check(sizes)
    sides = {name: ours(sizes, name) for name in ("native", "grouped")}
    sides.update({name: peer(sizes, name) for name in PEERS})
    times = interleave({n: (lambda run=run: run(True)) for n, run in sides.items()}, runs, clock=clock())
    seconds = {name: round(timing.median, 4) for name, timing in times.items()}
    mine, best = seconds["native"], min(seconds[name] for name in PEERS)
    peak = {"native": peak_extra_bytes(memory_of_ours, sizes, "native") / MIB}
    peak["grouped_mm"] = peak_extra_bytes(memory_of_peer, sizes, "grouped_mm") / MIB
    peak = {name: round(value, 1) for name, value in peak.items()}
    flop = 2 * sizes[1] * sizes[2] * 3 * INNER * WIDTH * 2
    share = flop / mine / sgemm_rate(clock=clock())
    details = {"seconds": seconds, "extra_mib": peak, "sgemm_share": round(share, 3), "clock": clock().__name__}
    case = "moe fwd+bwd frozen E{} A{} T{} D512 F256".format(*sizes)
    return [
        Result(case, "speed over transformers grouped_mm", seconds["grouped_mm"] / mine, least, details=details),
        Result(case, "speed over transformers' best", best / mine, least_of_best, details=details),
        Result(case, "memory of grouped_mm over ours", peak["grouped_mm"] / peak["native"], 2.0, details=details),
        Result(case, "speed of the PyTorch form over grouped_mm", seconds["grouped_mm"] / seconds["grouped"],
               details=details),
    ]


def adapted(sizes: Sizes, runs: int) -> list[Result]:
    """What adapters of rank 16 on gate_up and down add to the frozen forward pass."""
    layouts: dict[str, Layout | None] = {
        "frozen": None, "per_expert": "per_expert", "shared_outer": "shared_outer",
    }
    sides = {name: ours(sizes, "native", layout) for name, layout in layouts.items()}
    with torch.no_grad():
        forward = interleave({n: (lambda run=run: run(False)) for n, run in sides.items()}, runs, clock=clock())
    both = interleave({n: (lambda run=run: run(True)) for n, run in sides.items()}, runs, clock=clock())
    results = []
    case = "moe LoRA r16 E{} A{} T{} D512 F256".format(*sizes)
    for name, most in (("shared_outer", 0.15), ("per_expert", 0.25)):
        seconds = {n: round(t.median, 4) for n, t in forward.items()}
        share = forward[name].median / forward["frozen"].median - 1
        results.append(Result(case, f"forward: {name} adds (share)", share, most, at_least=False,
                              details={"seconds": seconds, "clock": clock().__name__}))
        seconds = {n: round(t.median, 4) for n, t in both.items()}
        share = both[name].median / both["frozen"].median - 1
        results.append(Result(case, f"fwd+bwd: {name} adds (share)", share, details={"seconds": seconds, "clock": clock().__name__}))
    return results


def run() -> list[Result]:
    """All rows."""
    return [
        *frozen(LARGE, 1.3, 1.0, 5), *frozen(MANY, 1.0, 1.0, 5), *adapted(LARGE, 9),
    ]
