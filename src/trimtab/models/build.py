"""Build a model from an ArchSpec, on the meta device.

Knows: which storage dtype each tensor gets. Names and shapes are those of the inventory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from trimtab.arch.maps import packed_forms
from trimtab.arch.spec import ArchSpec
from trimtab.models.decoder import CausalLM, StorageTypes
from trimtab.ops.backends import build_ops

BaseDtype = Literal["native", "bf16", "fp32", "fp64"]
_STORED = {"BF16": torch.bfloat16, "F32": torch.float32}


def build_model(
    arch: ArchSpec, *, base_dtype: BaseDtype = "bf16", compute_dtype: torch.dtype = torch.float32,
    ops: Mapping[str, str] | None = None, vision: bool = True,
) -> CausalLM:
    """The model with all parameters on meta and frozen; `to_empty` gives it memory.

    Args:
        arch: what to build.
        base_dtype: how weights are kept: `native` as stored (experts packed where they are),
            `bf16` and `fp32` for tensors stored in the model's dtype, while tensors stored as F32
            stay float32; `fp64` for everything.
        compute_dtype: dtype of activations.
        ops: implementations forced per operator.
        vision: build tower and projector where the architecture has them.
    """
    with torch.device("meta"):
        types = storage_types(arch, base_dtype)
        model = CausalLM(arch, types, compute_dtype, build_ops(ops), vision=vision)
    return model.requires_grad_(False)


def storage_types(arch: ArchSpec, base_dtype: BaseDtype) -> StorageTypes:
    """Storage dtypes for `base_dtype`."""
    if base_dtype == "fp64":
        return StorageTypes(torch.float64, torch.float64, {})
    stored = _STORED[arch.dtype]
    if stored is torch.float32 or base_dtype == "native":
        main = stored
    else:
        main = torch.bfloat16 if base_dtype == "bf16" else torch.float32
    packed = packed_forms(arch) if base_dtype == "native" else {}
    return StorageTypes(main, torch.float32, packed)
