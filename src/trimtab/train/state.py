"""Training state on disk: exact, keyed by logical tensor name, whole or not there.

Knows: `checkpoints/step-N` directories, adapters, optimizer moments, the data position. Does not
know: recipes, the loop. No random state is kept because none exists: masks follow from the seed,
the step and the token.

    step-N/adapter.safetensors     {fqn}.lora.A, {fqn}.lora.B            float32
    step-N/optimizer.safetensors   {name}.exp_avg, .exp_avg_sq, .step    float32
    step-N/state.json              step, data position, identity of the run
    step-N/manifest.json           sizes and hashes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import Parameter

from trimtab.checkpoint.manifest import read_manifest, verify_files, write_artefact
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.errors import RunError

_PREFIX, _REMOVING = "step-", ".removing-"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class TrainState:
    """What a run continues from.

    Args:
        step: steps done.
        data: place in the data stream, as `DataStream.state` gives it.
        identity: hash of the recipe values that may not change.
    """

    step: int
    data: Mapping[str, object]
    identity: str


def snapshot(
    parameters: Mapping[str, Parameter], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of adapters and moments in host memory, so that training may go on."""
    adapters = {name: _copy(parameter) for name, parameter in parameters.items()}
    moments = {
        f"{name}.{moment}": _copy(optimizer.state[parameter][moment])
        for name, parameter in parameters.items()
        if parameter in optimizer.state  # one not yet updated has none
        for moment in _MOMENTS
    }
    return adapters, moments


def write_state(
    checkpoints: Path, state: TrainState, adapters: Mapping[str, Tensor],
    moments: Mapping[str, Tensor], *, keep: int, in_use: Collection[Path] = (),
) -> Path:
    """Write `checkpoints/step-N` and then remove all but the newest `keep` and those in use.

    Returns:
        The directory written.
    """
    path = checkpoints / f"{_PREFIX}{state.step}"
    if _is_whole(path):
        return path
    with write_artefact(path, "training_state", extra={"step": state.step}) as out:
        out.write("adapter.safetensors", save(dict(adapters)))
        out.write("optimizer.safetensors", save(dict(moments)))
        out.write("state.json", (json.dumps(asdict(state), indent=1) + "\n").encode())
    for old in _whole_states(checkpoints)[max(1, keep):]:
        if old not in in_use:
            _remove(old)
    return path


def newest_state(checkpoints: Path) -> Path | None:
    """The newest whole `step-N`, after removing what a kill left half-written or half-removed."""
    if not checkpoints.is_dir():
        return None
    for path in checkpoints.iterdir():
        unfinished = path.name.startswith(_PREFIX) and (path / MARKER_NAME).exists()
        if path.name.startswith(_REMOVING) or unfinished:
            _remove(path)
    whole = _whole_states(checkpoints)
    return whole[0] if whole else None


def read_state(path: Path) -> TrainState:
    """The numbers of a saved state, without its tensors."""
    return TrainState(**json.loads((path / "state.json").read_text(encoding="utf-8")))


def restore_state(
    path: Path, parameters: Mapping[str, Parameter], optimizer: torch.optim.Optimizer
) -> TrainState:
    """Fill adapters and moments from a saved state, after checking its hashes and its names.

    Raises:
        RunError: TT603, a file is damaged, or names or shapes are not those of this run.
    """
    for verdict in verify_files(path):
        if not verdict.passed:
            raise RunError("TT603", str(path), f"is damaged: {verdict.where}",
                           hint="remove this step directory; the run continues from the one before")
    adapters = _load(path / "adapter.safetensors")
    moments = _load(path / "optimizer.safetensors")
    _check_names(path, adapters, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(adapters[name])
            kept = {m: moments[f"{name}.{m}"] for m in _MOMENTS if f"{name}.{m}" in moments}
            if kept:
                optimizer.state[parameter] = kept
    return read_state(path)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError("TT603", str(path), f"cannot be read: {error}") from error


def _check_names(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Parameter]) -> None:
    different = found.keys() ^ wanted.keys()
    shapes = [n for n in found.keys() & wanted.keys() if found[n].shape != wanted[n].shape]
    if different or shapes:
        names = sorted(different) or sorted(shapes)
        raise RunError("TT603", str(path), f"{len(names)} adapter tensors differ from this run's",
                       value=names[0])


def _whole_states(checkpoints: Path) -> list[Path]:
    """Whole step directories, newest first."""
    paths = [p for p in checkpoints.glob(f"{_PREFIX}*") if _is_whole(p)]
    return sorted(paths, key=lambda p: int(p.name.removeprefix(_PREFIX)), reverse=True)


def _is_whole(path: Path) -> bool:
    if not path.is_dir() or (path / MARKER_NAME).exists():
        return False
    return read_manifest(path) is not None


def _remove(path: Path) -> None:
    # Renamed first, so that a kill in between leaves nothing that looks like a state.
    if path.name.startswith(_REMOVING):
        shutil.rmtree(path)
        return
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)
