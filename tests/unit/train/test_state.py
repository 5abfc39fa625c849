from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from trimtab.errors import RunError
from trimtab.train.state import TrainState, newest_state, restore_state, snapshot, write_state


def fresh(seed: int = 0) -> tuple[dict[str, Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    named = {
        f"layers.{i}.q_proj.lora.{m}": Parameter(torch.randn(2, 3, generator=generator))
        for i in range(2) for m in "AB"
    }
    return named, torch.optim.AdamW(named.values(), lr=0.1, foreach=False)


def advance(named: dict[str, Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([(p**2).sum() for p in named.values()]).sum().backward()
        optimizer.step()


def test_a_restored_run_continues_bit_for_bit(tmp_path: Path) -> None:
    named, optimizer = fresh()
    advance(named, optimizer, 3)
    path = write_state(tmp_path, TrainState(3, {"position": 6}, "id"), *snapshot(named, optimizer), keep=2)
    advance(named, optimizer, 2)
    other, other_optimizer = fresh(seed=1)
    assert restore_state(path, other, other_optimizer) == TrainState(3, {"position": 6}, "id")
    advance(other, other_optimizer, 2)
    assert all(torch.equal(named[n], other[n]) for n in named)


def test_only_the_newest_are_kept_and_an_unfinished_one_is_not_taken(tmp_path: Path) -> None:
    named, optimizer = fresh()
    advance(named, optimizer, 1)
    for step in (2, 4, 10):
        write_state(tmp_path, TrainState(step, {"position": step}, "id"), *snapshot(named, optimizer), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-4"]
    unfinished = tmp_path / "step-12"
    unfinished.mkdir()
    (unfinished / ".trimtab-incomplete").write_text("adapter.safetensors\n")
    (unfinished / "adapter.safetensors").write_bytes(b"half")
    newest = newest_state(tmp_path)
    assert newest is not None and newest.name == "step-10"
    assert not unfinished.exists()


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    named, optimizer = fresh()
    advance(named, optimizer, 1)
    path = write_state(tmp_path, TrainState(1, {"position": 1}, "id"), *snapshot(named, optimizer), keep=1)
    data = bytearray((path / "adapter.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "adapter.safetensors").write_bytes(bytes(data))
    with pytest.raises(RunError, match="TT603"):
        restore_state(path, *fresh())


def test_a_state_of_other_targets_is_refused(tmp_path: Path) -> None:
    named, optimizer = fresh()
    advance(named, optimizer, 1)
    path = write_state(tmp_path, TrainState(1, {"position": 1}, "id"), *snapshot(named, optimizer), keep=1)
    named.pop("layers.0.q_proj.lora.A")
    with pytest.raises(RunError, match=r"TT603.*layers\.0\.q_proj\.lora\.A"):
        restore_state(path, named, optimizer)


def test_there_is_no_state_before_the_first_checkpoint(tmp_path: Path) -> None:
    assert newest_state(tmp_path / "checkpoints") is None
