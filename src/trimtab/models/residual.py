"""Residual streams: how a layer reads its input and writes its output.

The state is an explicit value; nothing in it is changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.arch.spec import ArchSpec, AttnRes
from trimtab.models.linear import RMSNorm, Weight
from trimtab.ops.residual import attn_res_mix


@dataclass(frozen=True, slots=True)
class StreamState:
    """The residual state between layers.

    Args:
        acc: [T, D], the running sum; None right after it was banked.
        bank: frozen rows [T, D], empty for a plain residual.
    """

    acc: Tensor | None
    bank: tuple[Tensor, ...] = ()

    def write(self, y: Tensor) -> StreamState:
        """Add a block's output to the running sum."""
        return StreamState(y if self.acc is None else self.acc + y, self.bank)

    @property
    def hidden(self) -> Tensor:
        """[T, D], the running sum."""
        assert self.acc is not None, "read only after a block has written"
        return self.acc


def add_mix(module: nn.Module, prefix: str, d: int, eps: float, dtype: torch.dtype) -> None:
    """Give a module the two tensors of one mixing site, `{prefix}_norm` and `{prefix}_proj`."""
    module.add_module(f"{prefix}_norm", RMSNorm(d, eps, dtype))
    module.add_module(f"{prefix}_proj", Weight((1, d), dtype))


def read(module: nn.Module, prefix: str, state: StreamState) -> Tensor:
    """The input of a block: the running sum, or its mix with the bank at the site `prefix`.

    With an empty bank the mix is the running sum itself.
    """
    if not state.bank:
        return state.hidden
    norm, proj = getattr(module, f"{prefix}_norm"), getattr(module, f"{prefix}_proj")
    rows = [*state.bank] if state.acc is None else [*state.bank, state.acc]
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    return attn_res_mix(rows, norm.weight.to(dtype) * proj.weight[0].to(dtype), norm.eps)


def starts_block(arch: ArchSpec, layer: int) -> bool:
    """Whether the stream is banked at this layer, after its first read."""
    return isinstance(arch.residual, AttnRes) and layer % arch.residual.block_size == 0


def banked(state: StreamState) -> StreamState:
    """Freeze the running sum as a row of the bank and start anew."""
    return StreamState(None, (*state.bank, state.hidden))
