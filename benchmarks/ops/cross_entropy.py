"""Cross-entropy over K3's vocabulary beside torch's on all logits, frozen head, float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes
from trimtab.ops.cross_entropy import CROSS_ENTROPY

WORDS = 163840


def all_logits(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    del z_loss
    logits = hidden @ weight.to(hidden.dtype).mT
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


SIDES = {"tiles": CROSS_ENTROPY, "torch": all_logits}


def draw(rows: int, width: int, words: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width)
    weight = torch.randn(words, width).mul_(0.02).to(getattr(torch, dtype))
    return hidden, weight, torch.randint(0, words, (rows,))


def prepare(side: str, rows: int, width: int, words: int, dtype: str) -> Callable[[], object]:
    """One forward and backward pass, inputs made beforehand."""
    hidden, weight, labels = draw(rows, width, words, dtype)
    hidden.requires_grad_()

    def step() -> Tensor:
        hidden.grad = None
        SIDES[side](hidden, weight, labels, 0.0).sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    return step


def warmed(side: str, rows: int, width: int, words: int, dtype: str) -> Callable[[], object]:
    """`prepare`, after a small pass has brought in the libraries that a pass needs."""
    prepare(side, 2, width, 10, dtype)()
    return prepare(side, rows, width, words, dtype)


def check() -> float:
    """Largest relative error of the gradient against float64 with all logits."""
    hidden, weight, labels = draw(65, 64, 5000, "float32")
    gradients = []
    for op, dtype in ((all_logits, torch.float64), (CROSS_ENTROPY, torch.float32)):
        leaf = hidden.to(dtype).requires_grad_()
        op(leaf, weight.to(dtype), labels, 0.0).sum().backward()
        gradients.append(leaf.grad.double())
    error = float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())
    assert error < 1e-5, error
    return error


def run() -> list[Result]:
    error = check()
    rows, width = 1024, 512
    times = interleave({side: prepare(side, rows, width, WORDS, "float32") for side in SIDES}, 3, warmup=0)
    ours, theirs = (times[side].median for side in ("tiles", "torch"))
    case = f"cross_entropy fwd+bwd R{rows} D{width} W{WORDS}"
    large = f"cross_entropy fwd+bwd R4096 D{width} W{WORDS}"
    peak, peer = (peak_extra_bytes(warmed, s, rows, width, WORDS, "float32") for s in ("tiles", "torch"))
    whole = peak_extra_bytes(warmed, "tiles", 4096, width, WORDS, "float32")
    return [
        Result(
            case, "speed over torch with all logits", theirs / ours, 1.0,
            details={"seconds": ours, "peer_seconds": theirs, "error": error},
        ),
        Result(case, "peer memory over ours", peer / peak, 10.0, details={"peer_mib": peer / MIB}),
        Result(large, "extra memory (MiB)", whole / MIB, 256.0, at_least=False),
    ]
