"""What the CUDA kernels are checked and timed on: each beside its equation and its PyTorch form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.arch.quantization import PackedForm
from trimtab.arch.spec import ActivationSpec
from trimtab.ops import mxfp4
from trimtab.ops.attention.operators import LatentKeys
from trimtab.ops.attention.packs import pack_borders
from trimtab.ops.attention.selection import Selection
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.lora import ExpertLoRA
from trimtab.ops.packed import PackedMatrices

SITU = ActivationSpec("situ", 4.0, 25.0)
MXFP4 = PackedForm("mxfp4", (1, 32))


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one size.

    Args:
        name: operator and sizes.
        operator: in the operator table.
        leaves: inputs that get a gradient, float64 on the CPU.
        outputs: the results of an implementation for leaves of any dtype and device.
    """

    name: str
    operator: str
    leaves: list[Tensor]
    outputs: Callable[[Any, Sequence[Tensor]], list[Tensor]]

    def run(self, op: Callable[..., Any], dtype: torch.dtype, device: str) -> list[Tensor]:
        """Outputs and the gradient of every leaf, under fixed incoming gradients."""
        return self.prepared(op, dtype, device)()

    def prepared(
        self, op: Callable[..., Any], dtype: torch.dtype, device: str
    ) -> Callable[[], list[Tensor]]:
        """`run` with the inputs already in place."""
        leaves = [x.to(device, dtype).requires_grad_() for x in self.leaves]

        def step() -> list[Tensor]:
            outs = self.outputs(op, leaves)
            grads = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64) for x in outs]
            incoming = [g.to(x.device, x.dtype).view_as(x) for g, x in zip(grads, outs, strict=True)]
            return [*outs, *torch.autograd.grad(outs, leaves, incoming)]

        return step


def situ(tokens: int, width: int) -> Case:
    leaves = [3 * _draw(tokens, width, seed=s) for s in (0, 1)]
    return Case(f"situ T{tokens} F{width}", "activation", leaves, lambda op, x: [op(SITU, *x)])


def attn_res(tokens: int, width: int, rows: int) -> Case:
    leaves = [*(_draw(tokens, width, seed=s) for s in range(rows)), _draw(width) / width**0.5]
    name = f"attn_res T{tokens} D{width} m{rows}"
    return Case(name, "attn_res", leaves, lambda op, x: [op(x[:-1], x[-1], 1e-5)])


def kda(lengths: Sequence[int], heads: int, key: int, value: int, gate: float) -> Case:
    """Gates reach down to -gate; sequences may be empty."""
    t = sum(lengths)
    q, k = (torch.nn.functional.normalize(_draw(1, t, heads, key, seed=s), dim=-1) for s in (0, 1))
    g = -gate * torch.rand(1, t, heads, key, generator=_generator(2), dtype=torch.float64)
    beta = torch.rand(1, t, heads, generator=_generator(3), dtype=torch.float64)
    state = _draw(len(lengths), heads, key, value, seed=5)
    borders = torch.tensor([0, *lengths]).cumsum(0)

    def outputs(op: Callable[..., Any], x: Sequence[Tensor]) -> list[Tensor]:
        return list(op(*x[:5], key**-0.5, x[5], True, borders))

    leaves = [q, k, _draw(1, t, heads, value, seed=4), g, beta, state]
    name = f"kda {'+'.join(map(str, lengths))} H{heads} K{key} V{value} gate -{gate:g}"
    return Case(name, "kda", leaves, outputs)


def attention(lengths: Sequence[int], heads: int, sizes: tuple[int, int, int, int], top_k: int) -> Case:
    """Sizes are L, P and, per head, the keys without P and the values."""
    rank, extra, key, value = sizes
    t = sum(lengths)
    leaves = [
        _draw(t, heads, key + extra), _draw(t, rank, seed=1), _draw(t, extra, seed=2),
        _draw(heads, key + value, rank, seed=3) / rank**0.5,
    ]
    positions = _positions(lengths, top_k)

    def outputs(op: Callable[..., Any], x: Sequence[Tensor]) -> list[Tensor]:
        q, latent, shared, weight = x
        borders = pack_borders(tuple(lengths), q.device)
        selection = Selection.from_positions(positions.to(q.device), borders)

        def expand() -> Tensor:
            return torch.einsum("tl,hwl->thw", latent, weight)

        keys = LatentKeys(latent, shared, expand, lambda: weight, value)
        return [op(q, keys, 0.3, borders, selection)]

    name = f"attention {'+'.join(map(str, lengths))} H{heads} L{rank} P{extra} S{top_k}"
    return Case(name, "attention", leaves, outputs)


def _positions(lengths: Sequence[int], top_k: int) -> Tensor:
    """[T, S]: random keys of each query; the first query of all may use none."""
    rows, begin = [], 0
    for length in lengths:
        for t in range(length):
            n = min(t + 1, top_k) if rows else 0
            found = torch.randperm(t + 1, generator=_generator(t))[:n].sort().values + begin
            rows.append(torch.nn.functional.pad(found, (0, top_k - n), value=-1))
        begin += length
    return torch.stack(rows)


def experts(tokens: int, sizes: tuple[int, int, int, int], rank: int) -> Case:
    """Sizes are E, A, D and F; rank 0 is without adapters. The last expert gets no token."""
    e, a, d, f = sizes
    ids = torch.stack([torch.randperm(e - 1, generator=_generator(t))[:a].sort().values for t in range(tokens)])
    ids[tokens // 2, 0] = -1  # one choice that was dropped
    stored = [mxfp4.encode(_draw(e, *shape, seed=s)) for s, shape in enumerate(((2 * f, d), (d, f)))]
    leaves = [_draw(tokens, d), torch.rand(tokens, a, generator=_generator(1), dtype=torch.float64)]
    if rank:
        leaves += [
            _draw(e, rank, d, seed=2) / d**0.5, _draw(e, 2, f, rank, seed=3),
            _draw(e, rank, f, seed=4) / f**0.5, _draw(e, d, rank, seed=5),
        ]

    def outputs(op: Callable[..., Any], x: Sequence[Tensor]) -> list[Tensor]:
        gate_up, down = (
            PackedMatrices(*(part.to(x[0].device) for part in pair), MXFP4, parts)
            for pair, parts in zip(stored, (2, 1), strict=True)
        )
        pairs = [ExpertLoRA(x[i], x[i + 1], "per_expert", 0.5) if rank else None for i in (2, 4)]
        return [op(ExpertCall(x[0], ids.to(x[0].device), x[1], gate_up, down, SITU, *pairs))]

    name = f"experts mxfp4 T{tokens} E{e} A{a} D{d} F{f} r{rank}"
    return Case(name, "experts", leaves, outputs)


def small() -> list[Case]:
    """Odd sizes that the interpreter gets through in seconds."""
    return [
        situ(5, 7), attn_res(5, 12, 4), kda([17], 1, 5, 20, 5.0), kda([1, 0, 3], 2, 16, 16, 60.0),
        kda([260], 1, 4, 4, 1.0), attention([3, 9], 3, (20, 6, 7, 9), 5),
        experts(6, (4, 2, 64, 32), 3), experts(3, (3, 2, 96, 32), 0),
    ]


def medium() -> list[Case]:
    """Released widths, short enough for the float64 equation."""
    return [
        situ(100, 6144), attn_res(100, 7168, 9), kda([100, 1, 0, 300], 2, 128, 128, 5.0),
        kda([65], 2, 128, 128, 60.0), kda([600], 1, 64, 64, 1.0),
        attention([65, 130], 20, (512, 64, 128, 128), 48), experts(64, (8, 4, 512, 256), 16),
        experts(65, (16, 4, 512, 256), 0),
    ]


def large() -> list[Case]:
    """What is timed."""
    return [
        situ(8192, 6144), attn_res(4096, 7168, 9), kda([4096], 32, 128, 128, 5.0),
        attention([4096], 64, (512, 64, 128, 128), 1024), experts(4096, (64, 8, 2048, 1024), 16),
    ]


# Implementations that need a CUDA device, by operator, and the PyTorch form beside each.
KERNELS = {
    "activation": (("triton",), "blocks"), "attn_res": (("triton",), "one_pass"),
    "kda": (("triton", "fla"), "chunk"), "attention": (("triton",), "gather"),
    "experts": (("triton",), "grouped"),
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=_generator(seed), dtype=torch.float64)
