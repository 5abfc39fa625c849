"""Recipes: what is accepted, and that every fault names its line and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config.load import dump_recipe, load_recipe
from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError, ErrorList

MINIMAL = """\
model: {path: .}
finetune:
  data:
    domain: {path: domain.jsonl}
    general: {path: general.jsonl}
output: runs/x
"""
EVERYDAY = """\
model: {path: .}
finetune:
  method: lora
  base_dtype: bf16
  lora:
    rank: 32
    alpha: 64
    dropout: 0.05
    target_modules: [q_proj, k_proj, v_proj, o_proj]
  optimizer: {lr: 1.0e-4, scheduler: cosine}
  data:
    domain: {path: domain.jsonl}
    general: {path: general.jsonl}
    domain_ratio: 0.8
    general_ratio: 0.2
output: runs/x
"""
# The recipe of the design document, with the evaluation sets filled in.
FULL = """\
model: {path: ., revision: null}
finetune:
  method: lora
  base_dtype: bf16
  lora: {rank: 32, alpha: 64, dropout: 0.05, target_modules: [attention], experts: none}
  optimizer:
    lr: 1.0e-4
    lr_by_branch: {sparse_attention: 5.0e-5, projector: 2.0e-5}
    scheduler: cosine
    warmup_ratio: 0.03
    weight_decay: 0.0
    max_grad_norm: 1.0
  vision: {tower: frozen, projector: lora}
  recompute: layer
  steps: 200
  batch: {tokens_per_step: 8192, micro_batch_tokens: 4096}
  data:
    domain: {path: domain.jsonl}
    general: {path: general.jsonl}
    domain_ratio: 0.8
    general_ratio: 0.2
    max_seq_len: 1024
    packing: true
parallel: {ep: 1, dp_shard: 1, tp: 1, pp: 1, cp: 1, dispatcher: auto, capacity_factor: null}
evaluate:
  domain: [{name: lemma, path: domain.jsonl, kind: generate, metric: exact_match}]
  general: [general.jsonl]
  gate: {min_domain_gain: 0.0, max_general_loss: 0.01}
checkpoint: {every_steps: 50, keep: 2}
track: [jsonl]
output: runs/demo
seed: 17
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("domain.jsonl", "general.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return load_recipe("recipe.yaml", overrides)


def fault(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return caught.value


def faults(folder: Path, text: str, *overrides: str) -> list[tuple[str, str]]:
    error = fault(folder, text, *overrides)
    errors = error.errors if isinstance(error, ErrorList) else [error]
    return [(e.code, e.where) for e in errors]


@pytest.mark.parametrize("text", [MINIMAL, EVERYDAY, FULL], ids=["minimal", "everyday", "full"])
def test_recipe_loads_and_its_dump_loads_to_the_same(folder: Path, text: str) -> None:
    recipe = load(folder, text)
    assert load(folder, dump_recipe(recipe)) == recipe
    assert dump_recipe(load(folder, dump_recipe(recipe))) == dump_recipe(recipe)


def test_defaults_are_those_of_the_everyday_block(folder: Path) -> None:
    assert load(folder, MINIMAL) == load(folder, EVERYDAY)


def test_a_recipe_cannot_be_changed(folder: Path) -> None:
    recipe = load(folder, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


def test_exponent_without_a_point_is_a_number(folder: Path) -> None:
    assert load(folder, EVERYDAY.replace("1.0e-4", "3e-5")).finetune.optimizer.lr == 3e-5


def test_all_faults_are_reported_at_once_with_their_lines(folder: Path) -> None:
    text = EVERYDAY.replace("rank: 32", "rank: 0").replace("scheduler: cosine", "scheduler: cos")
    text = text.replace("dropout: 0.05", "droput: 0.05")
    assert faults(folder, text) == [
        ("TT102", "recipe.yaml:6: finetune.lora.rank"),
        ("TT101", "recipe.yaml:8: finetune.lora.droput"),
        ("TT102", "recipe.yaml:10: finetune.optimizer.scheduler"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("  lora: {rnak: 8}", "did you mean 'rank'"),
        ("  rank: 8", "did you mean finetune.lora.rank"),
        ("  lora: {target_moduls: [a]}", "did you mean 'target_modules'"),
    ],
)
def test_typo_is_answered_with_the_key_that_was_meant(folder: Path, line: str, said: str) -> None:
    error = fault(folder, MINIMAL.replace("finetune:", f"finetune:\n{line}"))
    assert error.code == "TT101"
    assert said in error.message


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("lora_r", "finetune.lora.rank"),
        ("lora_alpha", "finetune.lora.alpha"),
        ("per_device_train_batch_size", "finetune.batch.micro_batch_tokens"),
        ("gradient_accumulation_steps", "finetune.batch.tokens_per_step"),
        ("expert_model_parallel_size", "parallel.ep"),
        ("learning_rate", "finetune.optimizer.lr"),
        ("num_train_epochs", "finetune.epochs"),
        ("max_steps", "finetune.steps"),
        ("cutoff_len", "finetune.data.max_seq_len"),
    ],
)
def test_key_of_another_tool_names_ours(folder: Path, key: str, ours: str) -> None:
    error = fault(folder, f"{MINIMAL}{key}: 8\n")
    assert (error.code, error.where) == ("TT104", f"recipe.yaml:7: {key}")
    assert ours in error.message


def test_every_alias_leads_to_a_key_that_exists() -> None:
    from trimtab.config.aliases import ALIASES, NOTES
    from trimtab.config.document import dotted
    from trimtab.config.load import _known_paths

    known = {dotted((*path, key)) for path, keys in _known_paths(Recipe, ()) for key in keys}
    assert set(ALIASES.values()) <= known
    assert set(NOTES) <= set(ALIASES)


@pytest.mark.parametrize(
    ("old", "new", "code", "where"),
    [
        ("general_ratio: 0.2", "general_ratio: 0.3", "TT105", "finetune.data.general_ratio"),
        ("method: lora", "steps: 5\n  epochs: 1", "TT105", "finetune.epochs"),
        ("rank: 32", "rank: yes", "TT102", "finetune.lora.rank"),
        ("alpha: 64", "alpha: true", "TT102", "finetune.lora.alpha"),
        ("rank: 32", "rank: 8.5", "TT102", "finetune.lora.rank"),
        ("lr: 1.0e-4", "lr: .nan", "TT102", "finetune.optimizer.lr"),
        ("method: lora", "recompute: some", "TT102", "finetune.recompute"),
        ("rank: 32", "experts: all", "TT102", "finetune.lora.experts"),
        ("output: runs/x", "output: runs/x\nparallel: {tp: 2, ep: 3}", "TT105", "parallel.ep"),
        ("output: runs/x", "output: runs/x\nparallel: {pp: 2, stages: [1, 2, 3]}", "TT105",
         "parallel.stages"),
        ("output: runs/x", "outptu: runs/x", "TT101", "outptu"),
        ("    general: {path: general.jsonl}\n", "", "TT105", "finetune.data.general_ratio"),
        ("method: lora", "data: {}", "TT106", "finetune.data"),
        ("domain_ratio: 0.8", "max_seq_len: 1000", "TT105", "finetune.batch.micro_batch_tokens"),
        ("path: domain.jsonl", "path: domian.jsonl", "TT107", "finetune.data.domain.path"),
        ("path: domain.jsonl", "path: [domain.jsonl, x]", "TT107", "finetune.data.domain.path[1]"),
        ("path: domain.jsonl", "path: domain.jsonl, weights: [1, 2]", "TT105",
         "finetune.data.domain.weights"),
    ],
)  # fmt: skip
def test_bad_value_is_refused_by_path(
    folder: Path, old: str, new: str, code: str, where: str
) -> None:
    found = faults(folder, EVERYDAY.replace(old, new, 1))
    assert (code, where) in [(c, w.split(": ", 1)[1]) for c, w in found]


def test_missing_keys_are_named(folder: Path) -> None:
    found = faults(folder, "finetune: {data: {}}\n")
    assert [code for code, _ in found] == ["TT103", "TT103", "TT103"]
    text = " ".join(where for _, where in found)
    assert "model" in text and "finetune.data.domain" in text and "output" in text


def test_missing_file_suggests_the_one_beside_it(folder: Path) -> None:
    assert (
        "did you mean domain.jsonl" in fault(folder, MINIMAL.replace("domain.j", "domin.j")).message
    )
    load_recipe("recipe.yaml", check_paths=False)


@pytest.mark.parametrize("text", ["a: [1\n", "a:\n\tb: 1\n", "- 1\n", "a: 1\na: 2\n"])
def test_document_that_is_no_mapping_is_refused(folder: Path, text: str) -> None:
    assert fault(folder, text).code in {"TT106", "TT102"}
    assert "recipe.yaml" in fault(folder, text).where


def test_a_missing_recipe_is_no_traceback(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("nothing.yaml")
    assert caught.value.code == "TT107"


def test_override_goes_through_the_same_checks(folder: Path) -> None:
    recipe = load(folder, MINIMAL, "finetune.optimizer.lr=1e-3", "evaluate.domain=[domain.jsonl]")
    assert recipe.finetune.optimizer.lr == 1e-3
    assert recipe.evaluate.domain[0].metric == "exact_match"
    assert faults(folder, MINIMAL, "finetune.lora.rank=-1") == [
        ("TT102", "--set: finetune.lora.rank")
    ]
    assert fault(folder, MINIMAL, "finetune.lora.rank").code == "TT108"
    assert fault(folder, MINIMAL, "output.x=1").code == "TT108"


def test_epochs_override_replaces_the_default_length(folder: Path) -> None:
    finetune = load(folder, MINIMAL, "finetune.epochs=2").finetune
    assert (finetune.steps, finetune.epochs) == (None, 2.0)


def test_one_ratio_gives_the_other_and_no_general_set_gives_all_to_the_domain(folder: Path) -> None:
    one = load(folder, MINIMAL, "finetune.data.general_ratio=0.25").finetune.data
    assert one.domain_ratio == 0.75
    alone = load(folder, MINIMAL.replace("    general: {path: general.jsonl}\n", ""))
    assert alone.finetune.data.domain_ratio == 1.0


def test_extends_one_level(folder: Path) -> None:
    (folder / "base.yaml").write_text(MINIMAL + "seed: 3\n")
    recipe = load(folder, "extends: base.yaml\nfinetune: {lora: {rank: 4}}\n")
    assert (recipe.seed, recipe.finetune.lora.rank) == (3, 4)
    (folder / "base.yaml").write_text("extends: x.yaml\n")
    assert fault(folder, "extends: base.yaml\n").code == "TT102"
    assert fault(folder, "extends: gone.yaml\n").where == "recipe.yaml:1: extends"


def test_fault_in_an_extended_file_names_that_file(folder: Path) -> None:
    (folder / "base.yaml").write_text(MINIMAL + "sed: 3\n")
    assert fault(folder, "extends: base.yaml\n").where == "base.yaml:7: sed"


def test_model_path_is_a_hub_id_only_where_no_such_directory_could_be(folder: Path) -> None:
    text = MINIMAL.replace("model: {path: .}", "model: {path: checkpoints/k3}")
    assert load(folder, text).model.path == "checkpoints/k3"
    (folder / "checkpoints").mkdir()
    assert fault(folder, text).code == "TT107"
