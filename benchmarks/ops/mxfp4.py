"""Packed experts beside the same matrices in float32: equal results, time, memory of the layer.

D512 I256, frozen experts, forward and backward to the tokens and the routing weights. Named after
the form of the largest release; FP8 and INT4 are measured with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes
from benchmarks.ops.moe import INNER, LARGE, MANY, WIDTH, Sizes, clock, inputs, step
from trimtab.arch.quantization import PackedForm
from trimtab.arch.spec import ActivationSpec
from trimtab.models.packed import PackedWeight
from trimtab.ops.backends import build_ops
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.stored import DenseMatrices, ExpertMatrices
from trimtab.ops.packed import ENCODE

FORMS = {
    "mxfp4": PackedForm("mxfp4", (1, 32)), "fp8": PackedForm("fp8", (128, 128)),
    "int4": PackedForm("int4", (1, 32)),
}
# Time over that of float32 weights; memory over packed bytes and one expert's block.
MAX_RATIO = {LARGE: 1.25, MANY: 1.6}
MAX_MEMORY = 1.1


def packed(weight: Tensor, form: PackedForm) -> PackedWeight:
    """A weight [E, 2, F, D] or [E, D, F] in a form."""
    found = PackedWeight(tuple(weight.shape), form)
    for expert in range(weight.shape[0]):
        matrices = weight[expert].reshape(found.num_parts, -1, weight.shape[-1])
        for part, matrix in enumerate(matrices):
            index = (expert, part)[: weight.dim() - 2]
            for kind, value in zip(("packed", "scale"), ENCODE(matrix, form), strict=True):
                found.write_packed(index, kind, value)  # type: ignore[arg-type]
    return found


def run_with(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertMatrices, down: ExpertMatrices
) -> Callable[[], list[Tensor]]:
    """Forward and backward; returns the result and the gradients."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    op = build_ops().experts
    call = ExpertCall(x, ids, weights, gate_up, down, ActivationSpec("swiglu"))
    return lambda: step(lambda: op(call), [x, weights], True)


def layer(sizes: Sizes, name: str) -> Callable[[], object]:
    """Allocates the matrices of a layer, `float32` or packed, and runs it once; tokens exist before."""
    experts, _, tokens = sizes
    x = torch.randn(tokens, WIDTH)
    _, ids, weights = routed(sizes)

    def matrices(shape: tuple[int, ...]) -> ExpertMatrices:
        if name == "float32":
            return DenseMatrices(torch.full(shape, 0.01))
        weight = PackedWeight(shape, FORMS[name])
        weight.packed.data.random_(0, 256)
        weight.scale.data.fill_(120 if name == "mxfp4" else 0.01)
        return weight.matrices

    def work() -> object:
        shapes = ((experts, 2, INNER, WIDTH), (experts, WIDTH, INNER))
        return run_with(x, ids, weights, *(matrices(shape) for shape in shapes))()

    return work


def routed(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, expert ids and routing weights without the matrices."""
    experts, active, tokens = sizes
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    weights, ids = scores.topk(active)
    order = ids.argsort(-1)
    return scores, ids.gather(-1, order), weights.gather(-1, order)


def packed_bytes(sizes: Sizes, name: str) -> int:
    """Bytes of values and scales of a layer."""
    shapes = ((sizes[0], 2, INNER, WIDTH), (sizes[0], WIDTH, INNER))
    with torch.device("meta"):
        weights = [PackedWeight(shape, FORMS[name]) for shape in shapes]
    return sum(p.numel() * p.element_size() for weight in weights for p in weight.parameters())


def run() -> list[Result]:
    """All results."""
    results = []
    for sizes in (LARGE, MANY):
        results += times(sizes)
        results += [memory(sizes, name) for name in FORMS]
    return results


def times(sizes: Sizes, runs: int = 5) -> list[Result]:
    """Packed against decoded matrices, which must give the same bits."""
    experts, active, tokens = sizes
    case = f"experts fwd+bwd E{experts} A{active} T{tokens} D{WIDTH} F{INNER}"
    x, ids, weights, gate_up, down = inputs(sizes)
    sides: dict[str, Callable[[], object]] = {}
    results = []
    for name, form in FORMS.items():
        pair = [packed(weight, form) for weight in (gate_up, down)]
        sides[name] = run_with(x, ids, weights, *(weight.matrices for weight in pair))
        decoded = [
            DenseMatrices(torch.stack([w.matrix(e, torch.float32) for e in range(experts)]).view(shape.shape))
            for w, shape in zip(pair, (gate_up, down), strict=True)
        ]
        expected = run_with(x, ids, weights, *decoded)()
        same = all(torch.equal(a, b) for a, b in zip(sides[name](), expected, strict=True))  # type: ignore[arg-type]
        results.append(Result(f"{name} {case}", "equal to decoded matrices", float(same), 1.0))
        sides["float32"] = run_with(x, ids, weights, *decoded)
    timed = interleave(sides, runs, clock=clock())
    base = timed.pop("float32").median
    for name, timing in timed.items():
        results.append(Result(
            f"{name} {case}", "time over float32 weights", timing.median / base,
            MAX_RATIO[sizes] if name == "mxfp4" else None, at_least=False,
            details={"median_s": timing.median, "float32_median_s": base, "clock": clock().__name__},
        ))
    return results


def memory(sizes: Sizes, name: str) -> Result:
    """What the layer takes of the peak of a step: all but what the step takes beside float32 weights."""
    experts, active, tokens = sizes
    weights = experts * 3 * INNER * WIDTH * 4
    size, block = packed_bytes(sizes, name), weights // experts
    peak, dense = (peak_extra_bytes(layer, sizes, each) for each in (name, "float32"))
    layer_bytes = peak - (dense - weights)
    return Result(
        f"{name} layer E{experts} A{active} T{tokens}", "memory over packed bytes + a block",
        layer_bytes / (size + block), MAX_MEMORY, at_least=False,
        details={"peak_mib": peak / MIB, "packed_mib": size / MIB, "float32_peak_mib": dense / MIB},
    )
