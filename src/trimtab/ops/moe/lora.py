"""The low-rank updates of expert matrices, as the expert loop applies them.

    gate_up:  pre += scaling * B_e (A_e drop(x))          down:  y += scaling * B_e (A_e drop(h))

`per_expert` has A and B for every expert. `shared_outer` shares the outer matrix of a layer, A of
gate_up and B of down, which then acts on tokens instead of rows:

    gate_up:  pre += scaling * B_e (A drop(x))_t          down:  m += scaling * B sum_e w_te A_e drop(h)

Letters: E experts, r adapter rank, F FFN width, D width the experts work on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Layout = Literal["per_expert", "shared_outer"]


@dataclass(frozen=True, slots=True)
class ExpertLoRA:
    """The update of gate_up or of down.

    Args:
        A: gate_up [E, r, D], or [E, 2, r, D] with one for gate and one for up; down [E, r, F]. Without
            E where it is shared.
        B: gate_up [E, 2, F, r]; down [E, D, r], without E where it is shared.
        layout: which of them is shared.
        scaling: factor on B (A x).
        rate: probability of dropping an input feature; 0 outside training.
        key: of the dropout masks.
    """

    A: Tensor
    B: Tensor
    layout: Layout
    scaling: float
    rate: float = 0.0
    key: int = 0

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[-2]
