"""The operators a model runs, with their implementations, fastest first.

Knows: which implementations exist. An `OpTable` is built once and handed to the modules; there is
no global registry. `trimtab doctor ops` prints what runs here and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.ops.activation import ACTIVATION
from trimtab.ops.attention.operators import ATTENTION, INDEXER
from trimtab.ops.attention.selection import Selection
from trimtab.ops.cross_entropy import CROSS_ENTROPY
from trimtab.ops.hyper import HYPER_READ, HYPER_WRITE, HyperMix
from trimtab.ops.kda.operators import CONV_SILU, GATED_NORM, KDA, KDAResult
from trimtab.ops.moe.experts import EXPERTS
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.packed import DECODE, DecodeOp
from trimtab.ops.registry import Operator
from trimtab.ops.residual import ATTN_RES


@dataclass(frozen=True, slots=True)
class OpTable:
    """The operators that have more than one implementation.

    Args:
        kda: the gated delta rule; arguments as `kda_chunk`.
        attention: (q, keys, scale, borders, selection) -> [T, H, V]; `keys` are `LatentKeys`.
        indexer: (q, pooled, weights, rule, borders) -> Selection; arguments as `select`.
        packed_decode: (values, scale, form, out) -> out; see `ops.packed`.
        cross_entropy: arguments as `token_losses_reference`.
        attn_res: arguments as `attn_res_mix`.
        hyper_read: arguments as `hyper_mix`.
        hyper_write: arguments as the function of that name.
        experts: the routed experts of a layer, from an `ExpertCall` -> [T, D].
        conv_silu: arguments as `conv_silu_reference`.
        gated_norm: arguments as `gated_rms_norm`, [T, H, V].
        activation: arguments as `gated_activation`.
    """

    kda: Operator[..., KDAResult]
    attention: Operator[..., Tensor]
    indexer: Operator[..., Selection]
    packed_decode: DecodeOp
    cross_entropy: Operator[..., Tensor] = CROSS_ENTROPY
    attn_res: Operator[..., Tensor] = ATTN_RES
    hyper_read: Operator[..., tuple[Tensor, HyperMix]] = HYPER_READ
    hyper_write: Operator[..., Tensor] = HYPER_WRITE
    experts: Operator[[ExpertCall], Tensor] = EXPERTS
    conv_silu: Operator[[Tensor, Tensor, Tensor, int, bool], Tensor] = CONV_SILU
    gated_norm: Operator[[Tensor, Tensor, Tensor, float], Tensor] = GATED_NORM
    activation: Operator[..., Tensor] = ACTIVATION

    def operators(self) -> dict[str, Operator[..., Any]]:
        """Every operator by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def build_ops(overrides: Mapping[str, str] | None = None) -> OpTable:
    """All operators, those in `overrides` held to the implementation named.

    Args:
        overrides: operator -> implementation, such as {"kda": "reference"}.

    Raises:
        ConfigError: TT102, an operator or implementation that does not exist.
    """
    table = OpTable(KDA, ATTENTION, INDEXER, DECODE)
    operators = table.operators()
    forced: dict[str, Any] = {}
    for op, name in (overrides or {}).items():
        if op not in operators:
            known = ", ".join(operators)
            raise ConfigError("TT102", f"ops.{op}", f"no such operator; there are {known}")
        forced[op] = operators[op].force(name)
    return replace(table, **forced)
