"""Residual streams: how a block reads its input from the state between layers, and writes to it.

The state is an explicit value; nothing in it is changed in place. A layer has two sites,
`attention` and `ffn`, each read before its block and written after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from trimtab.arch.spec import ArchSpec, AttnRes, HyperConnections
from trimtab.models.linear import RMSNorm, Weight
from trimtab.ops.backends import OpTable
from trimtab.ops.hyper import HyperMix

Site = Literal["attention", "ffn"]

_ATTN_RES: dict[Site, str] = {"attention": "self_attention_res", "ffn": "mlp_res"}
_HYPER: dict[Site, str] = {"attention": "hc_attn", "ffn": "hc_ffn"}


class StreamState(ABC):
    """The residual state between layers."""

    @abstractmethod
    def read(self, layer: nn.Module, site: Site) -> tuple[Tensor, StreamState]:
        """The input of a block, [T, D], and the state that its output is written to.

        Args:
            layer: the decoder layer, which owns the weights of its sites.
            site: which of its two blocks reads.
        """

    @abstractmethod
    def write(self, y: Tensor) -> StreamState:
        """The state after a block has given y, [T, D]."""

    @abstractmethod
    def finish(self, model: nn.Module) -> Tensor:
        """The input of the final norm, [T, D], with the weights that the model itself owns."""

    @property
    @abstractmethod
    def hidden(self) -> Tensor:
        """What is shown of the state: [T, D], or [T, S, D] for S parallel streams."""


def start(arch: ArchSpec, x: Tensor, ops: OpTable) -> StreamState:
    """The state of the embedding rows x, [T, D]; reads and writes run through `ops`."""
    if isinstance(arch.residual, AttnRes):
        return AttnResState(ops, x)
    if isinstance(arch.residual, HyperConnections):
        return HyperState(ops, x.unsqueeze(1).expand(-1, arch.residual.streams, -1))
    return PlainState(x)


def add_sites(layer: nn.Module, arch: ArchSpec, dtype: torch.dtype, island: torch.dtype) -> None:
    """Give a decoder layer the weights of its two sites.

    Args:
        layer: gets children.
        arch: whose residual says which.
        dtype: storage dtype of matrices.
        island: storage dtype of what is stored as F32.
    """
    if isinstance(arch.residual, AttnRes):
        for prefix in _ATTN_RES.values():
            _add_mix(layer, prefix, arch.hidden_size, arch.residual.eps, dtype)
    if isinstance(arch.residual, HyperConnections):
        for name in _HYPER.values():
            hyper = HyperSite(arch.residual, arch.hidden_size, dtype, island)
            layer.add_module(name, hyper)


def add_output(model: nn.Module, arch: ArchSpec, dtype: torch.dtype) -> None:
    """Give a model the weights of the last read, if it has any."""
    if isinstance(arch.residual, AttnRes):
        _add_mix(model, "output_attn_res", arch.hidden_size, arch.residual.eps, dtype)


def starts_block(arch: ArchSpec, layer: int) -> bool:
    """Whether the stream is banked at this layer, after its first read."""
    return isinstance(arch.residual, AttnRes) and layer % arch.residual.block_size == 0


@dataclass(frozen=True, slots=True)
class PlainState(StreamState):
    """x + f(norm(x)).

    Args:
        acc: [T, D], the running sum.
    """

    acc: Tensor

    def read(self, layer: nn.Module, site: Site) -> tuple[Tensor, StreamState]:
        """The running sum."""
        del layer, site
        return self.acc, self

    def write(self, y: Tensor) -> StreamState:
        """Add to the running sum."""
        return PlainState(self.acc + y)

    def finish(self, model: nn.Module) -> Tensor:
        """The running sum."""
        del model
        return self.acc

    @property
    def hidden(self) -> Tensor:
        """[T, D], the running sum."""
        return self.acc


@dataclass(frozen=True, slots=True)
class AttnResState(StreamState):
    """Attention residuals: a running sum that is mixed with banked ones.

    Args:
        ops: the operators.
        acc: [T, D], the running sum; None right after it was banked.
        bank: frozen rows [T, D].
    """

    ops: OpTable
    acc: Tensor | None
    bank: tuple[Tensor, ...] = ()

    def read(self, layer: nn.Module, site: Site) -> tuple[Tensor, StreamState]:
        """The mix at the site; at the first site of a block's first layer the sum is banked."""
        mixed = self._mix(layer, _ATTN_RES[site])
        if site == "attention" and getattr(layer, "starts_block", False):
            return mixed, AttnResState(self.ops, None, (*self.bank, self.hidden))
        return mixed, self

    def write(self, y: Tensor) -> StreamState:
        """Add to the running sum."""
        return replace(self, acc=y if self.acc is None else self.acc + y)

    def finish(self, model: nn.Module) -> Tensor:
        """The mix at the output."""
        return self._mix(model, "output_attn_res")

    @property
    def hidden(self) -> Tensor:
        """[T, D], the running sum."""
        assert self.acc is not None, "read only after a block has written"
        return self.acc

    def _mix(self, module: nn.Module, prefix: str) -> Tensor:
        """The running sum mixed with the bank at a site; with an empty bank the sum itself."""
        if not self.bank:
            return self.hidden
        norm, proj = getattr(module, f"{prefix}_norm"), getattr(module, f"{prefix}_proj")
        rows = [*self.bank] if self.acc is None else [*self.bank, self.acc]
        dtype = torch.promote_types(rows[0].dtype, torch.float32)
        query = norm.weight.to(dtype) * proj.weight[0].to(dtype)
        return self.ops.attn_res(rows, query, norm.eps)


@dataclass(frozen=True, slots=True)
class HyperState(StreamState):
    """Hyper-connections: S parallel streams, all equal to the embedding at first.

    Args:
        ops: the operators.
        streams: [T, S, D].
        mix: how the block that reads now will write; None between blocks.
    """

    ops: OpTable
    streams: Tensor
    mix: HyperMix | None = None

    def read(self, layer: nn.Module, site: Site) -> tuple[Tensor, StreamState]:
        """A weighted sum of the streams."""
        module = layer.get_submodule(_HYPER[site])
        assert isinstance(module, HyperSite), "built for this residual"
        x, mix = self.ops.hyper_read(self.streams, *module.weights, module.spec)
        return x, replace(self, mix=mix)

    def write(self, y: Tensor) -> StreamState:
        """Mix the streams among each other and add y to each."""
        assert self.mix is not None, "a block reads before it writes"
        return HyperState(self.ops, self.ops.hyper_write(self.streams, y, self.mix))

    def finish(self, model: nn.Module) -> Tensor:
        """The mean of the streams."""
        del model
        return self.streams.mean(1)

    @property
    def hidden(self) -> Tensor:
        """[T, S, D]."""
        return self.streams


class HyperSite(nn.Module):
    """The weights of one site of hyper-connections: `fn` [M, S D], `base` [M], `scale` [3]."""

    def __init__(
        self, spec: HyperConnections, d: int, dtype: torch.dtype, island: torch.dtype
    ) -> None:
        super().__init__()
        self.spec = spec
        count = spec.num_weights
        self.fn = _parameter((count, spec.streams * d), dtype)
        self.base = _parameter((count,), island)
        self.scale = _parameter((3,), island)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """fn, base, scale."""
        return self.fn, self.base, self.scale


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _add_mix(module: nn.Module, prefix: str, d: int, eps: float, dtype: torch.dtype) -> None:
    """The two tensors of one mixing site, `{prefix}_norm` and `{prefix}_proj`."""
    module.add_module(f"{prefix}_norm", RMSNorm(d, eps, dtype))
    module.add_module(f"{prefix}_proj", Weight((1, d), dtype))
