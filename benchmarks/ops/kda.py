"""KDA, native and in PyTorch, beside the torch fallback of transformers' Kimi Linear.

All sides get the same normalised q and k in float32. The peer is quadratic in T in training, so it
runs one time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes, sgemm_rate
from trimtab.ops.backends import OpTable, build_ops
from trimtab.ops.kda.chunk import kda_chunk
from trimtab.ops.kda.native import kda_native
from trimtab.ops.kda.pair import kda_flops
from trimtab.ops.kda.reference import kda_reference
from trimtab.ops.native.library import unavailable
from trimtab.ops.norm import l2_norm
from trimtab.verify.tolerances import limit

BOUND = -5.0
KEY = 64
SIDES = ("native, bounded gate", "native, any gate", "PyTorch, bounded gate", "PyTorch, any gate")
PEER = "transformers"
NAMES = ("output", "dq", "dk", "dv", "dg", "dbeta")


def inputs(tokens: int, heads: int, gate: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, g, beta of one sequence; gates in (-5, 0), or log-normal ones down to -60."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, tokens, heads, KEY)
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    if gate == "bounded gate":
        g = BOUND * torch.rand(shape, generator=generator, dtype=dtype)
    else:
        g = -torch.exp(3 * torch.randn(shape, generator=generator, dtype=dtype)).clamp(max=60)
    beta = torch.sigmoid(torch.randn(shape[:3], generator=generator, dtype=dtype))
    return [l2_norm(q), l2_norm(k), v, g, beta]


def attend(side: str, tensors: list[Tensor]) -> Tensor:
    """The outputs of one side."""
    scale = KEY**-0.5
    if side == PEER:
        from transformers.models.kimi_linear import modeling_kimi_linear as peer

        out: Tensor = peer.chunk_kimi_delta_attention(*tensors)[0]
        return out
    op = kda_native if side.startswith("native") else kda_chunk
    bound = BOUND if side.endswith("bounded gate") else None
    return op(*tensors, scale, gate_bound=bound)[0]


def gradients(run: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def check() -> None:
    """Hold every side to the float64 recurrence."""
    for gate in ("bounded gate", "any gate"):
        exact = inputs(300, 2, gate, torch.float64)
        expected = gradients(lambda x: kda_reference(*x, KEY**-0.5)[0], exact)
        kind = "" if gate == "bounded gate" else ".hard"
        for side in (name for name in (*SIDES, PEER) if name == PEER or name.endswith(gate)):
            found = gradients(lambda x, side=side: attend(side, x), [x.float() for x in exact])
            for name, value, want in zip(NAMES, found, expected, strict=True):
                error = float((value - want).abs().max() / want.abs().max())
                allowed = limit(f"kda.{'output' if name == 'output' else 'gradients'}.float32{kind}")
                if side != PEER and not error <= allowed:
                    raise SystemExit(f"{side}: {name} differs from the recurrence by {error:.1e}")


def step(side: str, tokens: int, heads: int) -> Callable[[], object]:
    """Forward and backward of one side."""
    gate = "any gate" if side.endswith("any gate") else "bounded gate"
    leaves = [x.requires_grad_() for x in inputs(tokens, heads, gate)]
    dout = torch.ones_like(leaves[2])
    few = [x[:, :64] for x in leaves]  # what a first call loads is no memory of the operator
    torch.autograd.grad(attend(side, few), leaves, dout[:, :64])
    return lambda: torch.autograd.grad(attend(side, leaves), leaves, dout)


def forward(tokens: int, heads: int) -> Callable[[], object]:
    """Forward of the native kernel as in inference."""
    tensors = inputs(tokens, heads, "bounded gate")

    def run() -> Tensor:
        with torch.no_grad():
            return attend("native, bounded gate", tensors)

    attend("native, bounded gate", [x[:, :64] for x in tensors])
    return run


def run() -> list[Result]:
    """Speed and memory beside the peer, share of the machine's rate, growth with T."""
    if reason := unavailable("kda"):
        raise SystemExit(f"the native kernel is not available: {reason}")
    check()
    return [*beside_the_peer(), *over_lengths(), *a_million_tokens(), *around_the_scan()]


def beside_the_peer(tokens: int = 4096, heads: int = 8) -> list[Result]:
    case = f"kda fwd+bwd B1 T{tokens} H{heads} K{KEY} V{KEY}"
    sides = {name: step(name, tokens, heads) for name in (*SIDES, PEER)}
    timing = interleave(sides, 7, once=frozenset({PEER}))
    rate, flops = sgemm_rate(), sum(kda_flops(tokens, heads, KEY, KEY))
    limits = {"native": (100.0, 0.35), "PyTorch": (40.0, None)}
    rows = []
    for name in SIDES:
        seconds = timing[name].median
        faster, share = limits[name.split(",")[0]]
        details = {"seconds": seconds, "peer_seconds": timing[PEER].median, "peer_runs": 1}
        rows.append(Result(f"{case}, {name}", f"speed over {PEER}", timing[PEER].median / seconds,
                           faster, details=details))
        share = 0.28 if name == "native, any gate" else share
        rows.append(Result(f"{case}, {name}", "share of the sgemm rate", flops / seconds / rate, share,
                           details={"seconds": seconds, "flops": flops, "sgemm_flops": rate}))
    peer = peak_extra_bytes(step, PEER, tokens, heads)
    for name in ("native, any gate", "PyTorch, any gate"):
        own = peak_extra_bytes(step, name, tokens, heads)
        details = {"mib": own / MIB, "peer_mib": peer / MIB}
        rows.append(Result(f"{case}, {name}", f"{PEER}' extra memory over ours", peer / own, 30.0,
                           details=details))
    return rows


def over_lengths(heads: int = 8) -> list[Result]:
    """Time per token of the native kernel from 1K to 64K tokens."""
    per_token = {}
    for tokens in (1024, 4096, 16384, 65536):
        side = step("native, any gate", tokens, heads)
        timing = interleave({"native": side}, 3 if tokens > 4096 else 9)["native"]
        per_token[tokens] = timing.median / tokens / heads * 1e6
    spread = max(per_token.values()) / min(per_token.values())
    details = {"us_per_token_and_head": {str(t): round(us, 3) for t, us in per_token.items()}}
    return [Result(f"kda fwd+bwd H{heads} K{KEY} V{KEY}, native, T 1K to 64K",
                   "largest over smallest time per token", spread, 1.7, at_least=False, details=details)]


def a_million_tokens(heads: int = 2) -> list[Result]:
    """Memory of a long forward pass beyond its inputs and outputs."""
    extra = {}
    for tokens in (2**16, 2**20):
        output = tokens * heads * KEY * 4
        extra[tokens] = (peak_extra_bytes(forward, tokens, heads) - output) / MIB
    side = forward(2**20, heads)
    seconds = interleave({"forward": side}, 1, warmup=0)["forward"].median
    details = {"mib_at_65536": extra[2**16], "seconds": seconds}
    return [Result(f"kda forward T{2**20} H{heads} K{KEY} V{KEY}, native, no grad",
                   "memory beyond inputs and outputs (MiB)", extra[2**20], 16.0, at_least=False,
                   details=details)]


def around_the_scan(tokens: int = 1024, heads: int = 8) -> list[Result]:
    """What surrounds the scan in a layer, native beside PyTorch: forward and backward."""
    width = heads * KEY
    generator = torch.Generator().manual_seed(1)
    x, gate, dout = (torch.randn(tokens, width, generator=generator) for _ in range(3))
    weight, gain = torch.randn(width, 1, 4, generator=generator), torch.ones(KEY)
    where, x, gate = torch.arange(tokens), x.requires_grad_(), gate.requires_grad_()
    shape = (tokens, heads, KEY)
    pieces: dict[str, Callable[[OpTable], Tensor]] = {
        "convolution, SiLU, L2 norm": lambda ops: ops.conv_silu(x, weight, where, KEY, True),
        "gated norm": lambda ops: ops.gated_norm(x.view(shape), gate.view(shape), gain, 1e-5).flatten(1),
    }
    tables = {
        "native": build_ops({"conv_silu": "native", "gated_norm": "native"}),
        "PyTorch": build_ops({"conv_silu": "reference", "gated_norm": "reference"}),
    }
    rows = []
    for piece, call in pieces.items():
        sides = {
            name: lambda ops=ops, call=call: torch.autograd.grad(call(ops), x, dout)
            for name, ops in tables.items()
        }
        found, expected = (side()[0] for side in sides.values())
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= limit("kda.gradients.float32"):
            raise SystemExit(f"{piece}: gradients differ by {error:.1e}")
        timing = interleave(sides, 9)
        seconds = {name: each.median for name, each in timing.items()}
        rows.append(Result(f"{piece}, T{tokens} H{heads} K{KEY}, native", "speed over PyTorch",
                           seconds["PyTorch"] / seconds["native"], details={"seconds": seconds}))
    return rows
