"""What routed experts are called outside: as one parameter per layer, and as one module per matrix.

Knows: the names of all experts of a layer together in transformers, and the released name of every
single matrix. Does not know: tensors, files.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.arch.maps import WEIGHT_MAPS
from trimtab.arch.maps.rules import WeightMap, matching, rename
from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec

# What transformers calls the parameters that hold all experts, and the matrices before it joins them.
_PARAMETERS = {"gate_up": "gate_up_proj", "down": "down_proj"}
_LEAVES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of gate_up or down of one layer.

    Args:
        module: what holds all experts, transformers' in-memory name or the released one.
        parameter: name of the joined parameter in it, [E, out, in].
        released: template of the released module of each matrix, with `{e}` for the expert.
        is_joined: transformers has the family, and joins the experts of a layer in memory.
    """

    module: str
    parameter: str
    released: tuple[str, ...]
    is_joined: bool

    @property
    def joined(self) -> str:
        """The joined parameter."""
        return f"{self.module}.{self.parameter}"

    @property
    def aliases(self) -> tuple[str, ...]:
        """Templates by the usual leaf names below `module`, one per matrix."""
        leaf = "gate_up" if len(self.released) == 2 else "down"
        return tuple(f"{self.module}.{{e}}.{each}" for each in _LEAVES[leaf])


def expert_names(arch: ArchSpec) -> dict[str, ExpertNames]:
    """Names of every `layers.i.mlp.experts.gate_up` and `.down`, by ours.

    >>> from trimtab.arch.load import load_arch
    >>> from trimtab.arch.presets import preset_config
    >>> names = expert_names(load_arch(preset_config("kimi-linear-tiny")))
    >>> names["layers.1.mlp.experts.gate_up"].joined
    'model.layers.1.mlp.experts.gate_up_proj'
    >>> names["layers.1.mlp.experts.down"].released
    ('model.layers.1.block_sparse_moe.experts.{e}.w2',)
    """
    weight_map = WEIGHT_MAPS[arch.family]
    return {
        param.name: _names(param.name, weight_map)
        for param in inventory(arch) if param.owner == "routed_expert"
    }


def _names(param: str, weight_map: WeightMap) -> ExpertNames:
    parent, _, leaf = param.rpartition(".")
    released = tuple(matching(param, weight_map.rules))
    module = rename(parent, weight_map.module_rules) or released[0].partition(".{e}.")[0]
    return ExpertNames(module, _PARAMETERS[leaf], released, bool(weight_map.module_rules))
