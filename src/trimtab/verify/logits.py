"""Logits of short token sequences, one at a time.

Knows: how to run a model on an unpacked sequence. Does not know: files, what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.tape import ChoiceTape


@torch.no_grad()
def sequence_logits(
    model: CausalLM, ids: Sequence[int], tape: ChoiceTape | None = None
) -> Tensor:
    """[T, W] for T token ids; `tape` records or forces routing and selection.

    Raises:
        RuntimeError: a forced tape has choices of layers that this model lacks.
    """
    device = model.embed.weight.device
    tokens = torch.tensor(ids, dtype=torch.int64, device=device)
    hidden: Tensor = model(tokens, ForwardContext.packed([len(ids)], device, tape=tape))
    if tape is not None and tape.mode == "force":
        tape.check_all_used()
    return model.logits(hidden)


def probe_sequences(vocab_size: int, count: int = 3, length: int = 48) -> list[list[int]]:
    """Fixed pseudo-random token sequences for checks that need any text at all."""
    draw = torch.Generator().manual_seed(20)
    ids: list[list[int]] = torch.randint(vocab_size, (count, length), generator=draw).tolist()
    return ids


def token_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative error per token, ||found - wanted|| / ||wanted||, [T] float64."""
    found, wanted = found.double(), wanted.double()
    error = torch.linalg.vector_norm(found - wanted, dim=-1)
    relative: Tensor = error / torch.linalg.vector_norm(wanted, dim=-1).clamp_min(1e-30)
    return relative
