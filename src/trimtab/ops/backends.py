"""The operators a model runs, chosen once when it is built.

Knows: which implementations exist for each operator. The choice is explicit and passed to the
modules; there is no global registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.ops.attention.blockwise import PackBorders, blockwise_attention
from trimtab.ops.attention.reference import attention_reference
from trimtab.ops.kda.chunk import kda_chunk
from trimtab.ops.kda.layout import ChunkLayout
from trimtab.ops.kda.reference import kda_reference

KDAOp = Callable[..., tuple[Tensor, Tensor | None]]
AttentionOp = Callable[
    [Tensor, Tensor, Tensor, float, PackBorders, Tensor, Tensor | None], Tensor
]


@dataclass(frozen=True, slots=True)
class OpTable:
    """The implementation of each operator that has more than one.

    Args:
        kda: `kda_reference` or `kda_chunk`, with the keywords of the latter.
        attention: (q, k, v, scale, borders, cu_seqlens, selected) -> [T, H, V].
        names: operator -> implementation, for reports.
    """

    kda: KDAOp
    attention: AttentionOp
    names: Mapping[str, str]


def _kda_reference(
    *args: Tensor, gate_bound: float | None = None, layout: ChunkLayout | None = None, **kwargs: object
) -> tuple[Tensor, Tensor | None]:
    del gate_bound, layout  # what the chunked form needs and the equation does not
    return kda_reference(*args, **kwargs)  # type: ignore[arg-type]  # same signature, forwarded


def _attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, borders: PackBorders, cu_seqlens: Tensor,
    selected: Tensor | None,
) -> Tensor:
    del borders
    return attention_reference(q, k, v, scale, cu_seqlens, selected)


def _attention_blockwise(
    q: Tensor, k: Tensor, v: Tensor, scale: float, borders: PackBorders, cu_seqlens: Tensor,
    selected: Tensor | None,
) -> Tensor:
    del cu_seqlens
    return blockwise_attention(q, k, v, scale, borders, selected)


_KDA: Mapping[str, KDAOp] = {"chunk": kda_chunk, "reference": _kda_reference}
_ATTENTION: Mapping[str, AttentionOp] = {
    "blockwise": _attention_blockwise, "reference": _attention_reference,
}
_IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "kda": tuple(_KDA), "attention": tuple(_ATTENTION),
}


def build_ops(overrides: Mapping[str, str] | None = None) -> OpTable:
    """The first implementation of each operator, unless `overrides` names another.

    Raises:
        ConfigError: an operator or implementation that does not exist.
    """
    names = {op: found[0] for op, found in _IMPLEMENTATIONS.items()}
    for op, name in (overrides or {}).items():
        if op not in names:
            raise ConfigError("TT102", f"ops.{op}", f"no such operator; there are {', '.join(names)}")
        if name not in _IMPLEMENTATIONS[op]:
            known = ", ".join(_IMPLEMENTATIONS[op])
            raise ConfigError("TT102", f"ops.{op}", f"must be one of {known}", value=name)
        names[op] = name
    return OpTable(_KDA[names["kda"]], _ATTENTION[names["attention"]], names)
