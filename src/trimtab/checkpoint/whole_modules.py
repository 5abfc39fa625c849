"""Projector and routers trained in full, as PEFT's `modules_to_save` in an adapter directory.

Knows: the names of such modules outside. Does not know: how they are trained, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.arch.maps import router_names, stored_of
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec
from trimtab.errors import AdapterError


def whole_parameters(arch: ArchSpec) -> dict[str, ParamSpec]:
    """Every parameter of projector and routers by its path outside.

    That of a projector is its released name, that of a router PEFT's.
    """
    routers = router_names(arch)
    found: dict[str, ParamSpec] = {}
    for param in inventory(arch):
        module, _, leaf = param.name.rpartition(".")
        if param.owner == "projector":
            found |= {stored.name: param for stored in stored_of(arch, param)}
        elif param.owner == "router":
            found[f"{routers[module]}.{leaf}"] = param
    return found


def module_words(arch: ArchSpec, params: Sequence[ParamSpec]) -> list[str]:
    """What `modules_to_save` says for these parameters."""
    owners = {param.owner for param in params}
    words = [_projector(arch)] if "projector" in owners else []
    return words + ([_router(arch)] if "router" in owners else [])


def read_whole(config: Mapping[str, Any], arch: ArchSpec, where: str) -> dict[str, ParamSpec]:
    """The parameters that `modules_to_save` names, by path outside.

    Raises:
        AdapterError: TT502, it names other modules.
    """
    params = whole_parameters(arch)
    owners = {param.owner for param in params.values()}
    found: dict[str, ParamSpec] = {}
    for word in config.get("modules_to_save") or ():
        if "projector" in owners and word == _projector(arch):
            owner = "projector"
        elif "router" in owners and f".{_router(arch)}".endswith(f".{word}"):
            owner = "router"
        else:
            have = " and ".join(sorted(owners)) or "no module"
            raise AdapterError("TT502", f"{where}: modules_to_save", f"only {have} can be saved in full",
                               value=word)
        found |= {path: param for path, param in params.items() if param.owner == owner}
    return found


def _projector(arch: ArchSpec) -> str:
    """Released name of the projector module."""
    path, param = next((n, p) for n, p in whole_parameters(arch).items() if p.owner == "projector")
    return path.removesuffix(param.name.removeprefix("projector"))


def _router(arch: ArchSpec) -> str:
    """What the paths of all routers end with, such as `mlp.gate`."""
    return ".".join(next(iter(router_names(arch).values())).rsplit(".", 2)[-2:])
