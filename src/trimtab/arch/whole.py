"""Parameters that are trained themselves, without LoRA: those of the projector and of routers.

Knows: which parameters belong together. Does not know: torch, recipes.
"""

from __future__ import annotations

from collections.abc import Collection

from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec, MoESpec
from trimtab.errors import AdapterError


def full_targets(arch: ArchSpec) -> tuple[ParamSpec, ...]:
    """The parameters that `vision.projector: full` trains.

    Raises:
        AdapterError: TT501, the model has no projector.
    """
    found = tuple(p for p in inventory(arch) if p.owner == "projector")
    if not found:
        raise AdapterError("TT501", "finetune.vision.projector", "the model has no projector",
                           value="full")
    return found


def router_targets(arch: ArchSpec, *, weight: bool, bias: bool) -> tuple[ParamSpec, ...]:
    """The parameters of all routers that a recipe trains.

    Args:
        arch: the model.
        weight: the matrices, by gradient.
        bias: the selection biases, by Quantile Balancing.

    Raises:
        AdapterError: TT501, the model has no routers; TT503, they select within groups of experts,
            which Quantile Balancing knows nothing of.
    """
    routers = [layer.ffn for layer in arch.layers if isinstance(layer.ffn, MoESpec)]
    if not routers:
        raise AdapterError("TT501", "finetune.router.train", "the model has no routers")
    grouped = [router.groups for router in routers if router.groups > 1]
    if bias and grouped:
        raise AdapterError("TT503", "finetune.router.balance", "Quantile Balancing knows no groups of "
                           f"experts, and the routers select within {grouped[0]}", value="quantile",
                           hint="use balance: aux, or none")
    leaves = [leaf for leaf, wanted in ((".weight", weight), (".e_score_correction_bias", bias)) if wanted]
    return tuple(
        p for p in inventory(arch) if p.owner == "router" and p.name.endswith(tuple(leaves))
    )


def whole_kind(param: ParamSpec) -> str | None:
    """What is trained together with a parameter; None for one that is never trained itself.

    `projector`, `router.weight` or `router.e_score_correction_bias`.
    """
    if param.owner == "projector":
        return "projector"
    return ".".join(param.name.rsplit(".", 2)[-2:]) if param.owner == "router" else None


def trained_with(arch: ArchSpec, names: Collection[str]) -> tuple[ParamSpec, ...]:
    """All parameters of the kinds that these names are of, in inventory order."""
    params = inventory(arch)
    kinds = {whole_kind(p) for p in params if p.name in names} - {None}
    return tuple(p for p in params if whole_kind(p) in kinds)
