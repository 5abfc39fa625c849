"""Starting values of an adapter: those of an earlier adapter, as far as the two agree.

Knows: adapter directories, trainable tensors. Does not know: recipes, optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.nn import Parameter

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.adapter import AdapterFile, load_adapter
from trimtab.errors import AdapterError

_LISTED = 20  # differences written out


@torch.no_grad()
def start_from(
    path: str | Path,
    arch: ArchSpec,
    targets: Sequence[LoRATarget],
    parameters: Mapping[str, Parameter],
    base_fingerprint: str | None,
) -> str:
    """Fill trainable tensors from an adapter directory; those that it lacks keep their values.

    Args:
        path: adapter directory.
        arch: of the base.
        targets: modules that this run adapts.
        parameters: trainable tensors by name, at zero effect.
        base_fingerprint: of this run's base.

    Returns:
        What was taken over, in one line.

    Raises:
        AdapterError: TT502 with every tensor that does not fit: another rank or scaling, a target
            that this run lacks, another base.
    """
    read = load_adapter(path, arch)
    found = _differences(read, targets, parameters, base_fingerprint)
    if found:
        more = [f"and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
        raise AdapterError(
            "TT502", "finetune.lora.init_from", f"{len(found)} differences:\n  "
            + "\n  ".join([*found[:_LISTED], *more]), value=str(path),
            hint="give this run the ranks, alphas and targets of that adapter; it may have more",
        )
    for name, tensor in read.tensors.items():
        parameters[name].copy_(tensor)
    fresh = len(parameters) - len(read.tensors)
    rest = f", {fresh} start at zero effect" if fresh else ""
    return f"adapter starts from {path}: {len(read.tensors)} tensors{rest}; the optimizer is fresh"


def _differences(
    read: AdapterFile, targets: Sequence[LoRATarget], parameters: Mapping[str, Parameter],
    base_fingerprint: str | None,
) -> list[str]:
    found = []
    theirs = None if read.manifest is None else read.manifest.source_fingerprint
    if theirs is not None and base_fingerprint is not None and theirs != base_fingerprint:
        found.append(f"base model: the adapter was trained on other weights ({theirs[:12]}..., "
                     f"this run has {base_fingerprint[:12]}...)")
    for name, tensor in read.tensors.items():
        if name not in parameters:
            found.append(f"{name}: not trained by this run")
        elif parameters[name].shape != tensor.shape:
            found.append(f"{name}: {list(tensor.shape)}, this run has "
                         f"{list(parameters[name].shape)}")
    scalings = {target.fqn: target.scaling for target in targets}
    for target in read.targets:
        ours = scalings.get(target.fqn)
        if ours is not None and ours != target.scaling:
            found.append(f"{target.fqn}: scaling {target.scaling:g}, this run has {ours:g}")
    return found
