from __future__ import annotations

import copy

import pytest

from trimtab.train.identity import fixed_differences, fixed_hash

RECIPE: dict[str, object] = {
    "model": {"path": "m"},
    "finetune": {"steps": 10, "lora": {"rank": 8, "target_modules": ["q_proj"]}, "recompute": "layer"},
    "parallel": {"ep": 1},
    "output": "runs/a",
    "seed": 17,
}


def changed(path: str, value: object) -> dict[str, object]:
    recipe = copy.deepcopy(RECIPE)
    node: dict[str, object] = recipe
    *parents, leaf = path.split(".")
    for key in parents:
        node = node[key]  # type: ignore[assignment]
    node[leaf] = value
    return recipe


@pytest.mark.parametrize(
    ("path", "value"),
    [("finetune.steps", 20), ("parallel.ep", 2), ("output", "runs/b"), ("finetune.recompute", "none")],
)
def test_values_that_do_not_change_the_numbers_may_change(path: str, value: object) -> None:
    assert fixed_differences(RECIPE, changed(path, value)) == []
    assert fixed_hash(RECIPE) == fixed_hash(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [("seed", 1), ("finetune.lora.rank", 16), ("finetune.lora.target_modules", ["k_proj"]),
     ("model.path", "other"), ("finetune.lora.extra", 1), ("parallel.capacity_factor", 1.25)],
)
def test_values_that_change_the_numbers_are_named(path: str, value: object) -> None:
    (found,) = fixed_differences(RECIPE, changed(path, value))
    assert (found.key, found.ours) == (path, value)
    assert fixed_hash(RECIPE) != fixed_hash(changed(path, value))
