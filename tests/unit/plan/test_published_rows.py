"""The benchmark over published runs: reading rows, the split, the figures, on rows written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.planner_rows import MODELS, Skip, cases, is_test, predict
from benchmarks.planner_table import TableError, faults, read_rows

COLUMNS = (
    "id,group,task,model,hf_id,layers,hardware,n_dev,tp,pp,vpp,ep,etp,cp,dp,shard,mbs,gbs,seq,precision,"
    "optimizer,recompute,dispatcher,overlap_graphs,routing,lora,step_time_s,tok_s_dev,tflops_dev,"
    "mem_alloc,mem_reserved,mem_unit,mem_scope,outcome,framework,date,grade,source,notes"
)
DENSE = {
    "id": "a", "group": "00", "task": "pretrain", "model": "Llama3-70B(truncated)",
    "hf_id": "meta-llama/Meta-Llama-3-70B", "layers": "12", "hardware": "B200", "n_dev": "8",
    "tp": "8", "pp": "1", "ep": "1", "cp": "1", "shard": "dist-opt", "mbs": "1", "gbs": "4",
    "seq": "4096", "precision": "BF16", "recompute": "none", "step_time_s": "0.2809",
    "mem_alloc": "28.286", "mem_unit": "GiB", "mem_scope": "max over 8 ranks", "outcome": "ok",
    "framework": "Megatron-LM (SimuMax repro)",
    "notes": "SimuMax predicted 255.7 ms (-8.97%), 28.17 GiB (-0.42%)",
}


def row(**values: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS.split(","), "") | DENSE | values


def written(tmp_path: Path, rows: list[dict[str, str]]) -> Path:
    lines = ["# a legend", COLUMNS]
    lines += [",".join(f'"{cell[key]}"' for key in COLUMNS.split(",")) for cell in rows]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def models() -> dict[str, object]:
    loaded: dict[str, object] = json.loads(MODELS.read_text())
    return loaded


def test_a_row_is_predicted_in_the_counter_it_was_read_in(tmp_path: Path) -> None:
    rows = read_rows(written(tmp_path, [row(), row(id="b", mem_alloc="", mem_reserved="29.12")]))
    allocated, reserved = cases(rows, {})
    assert planner.memory_error(allocated) == pytest.approx(0, abs=0.004)
    assert reserved.is_reserved and planner.memory_error(reserved) == pytest.approx(0, abs=0.03)
    assert planner.printed(allocated, "GiB") == -0.0042 and planner.printed(allocated, "ms") == -0.0897


def test_rows_that_must_not_be_tuned_on_are_held_out() -> None:
    for values in ({"lora": "r8"}, {"task": "lora"}, {"routing": "natural"}, {"framework": "ROCm Megatron-LM"}):
        for group in ("00", "01", "02", "03"):
            assert is_test(row(group=group, **values))
    free = {is_test(row(group=f"{n:02x}")) for n in range(32)}
    assert free == {True, False}


def test_a_row_without_layout_length_or_model_is_left_out_with_the_reason() -> None:
    for values, reason in (
        ({"tp": "", "pp": "", "ep": ""}, "no layout"), ({"seq": "short"}, "sequence length"),
        ({"hf_id": "", "model": "Nobody-1B"}, "configuration"), ({"hardware": "abacus"}, "preset"),
        ({"tp": "3"}, "fit together"), ({"task": "inference-decode"}, "training step"),
        ({"task": "sft-dpo"}, "preference"), ({"notes": "padded variable length"}, "number of tokens"),
    ):
        with pytest.raises(Skip, match=reason):
            predict(row(**values), models())


def test_the_report_prints_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(), row(id="l", lora="r8 all", task="lora", framework="ms-swift", mem_alloc="")]
    path = written(tmp_path, rows)
    monkeypatch.setattr("sys.argv", ["planner", str(path)])
    assert planner.main() == 0
    page = capsys.readouterr().out
    assert "another table than the frozen one" in page
    assert "SimuMax, as it printed" in page and "Megatron-LM's formula" in page and "LoRA" in page


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": "four"}, "tp: `four` is not a whole number above 0"),
        ({"ep": "0"}, "ep: `0` is not a whole number above 0"),
        ({"mbs": "1.5"}, "mbs: `1.5` is not a whole number above 0"),
        ({"seq": "-4096"}, "seq: `-4096` is not a whole number above 0"),
        ({"step_time_s": "nan"}, "step_time_s: `nan` is not a number above 0"),
        ({"mem_unit": "pages"}, "mem_unit: `pages` is unknown; expected GiB or GB"),
        ({"mem_unit": ""}, "mem_unit: is empty beside a reading of memory"),
        ({"outcome": "crashed"}, "outcome: `crashed` is unknown"),
        ({"precision": "FP7"}, "precision: `FP7` is unknown"),
        ({"task": "distil"}, "task: `distil` is unknown"),
        ({"hardware": ""}, "hardware: is empty"),
    ],
)
def test_a_cell_that_cannot_be_read_is_named(values: dict[str, str], message: str) -> None:
    assert not list(faults(row()))
    (found,) = faults(row(**values))
    assert found.startswith(message)


def test_one_bad_row_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [row(), row(id="bad", tp="four"), row(id="odd", hf_id="x/Nobody", model="Nobody")])
    monkeypatch.setattr("sys.argv", ["planner", str(path)])
    assert planner.main() == 1
    page = capsys.readouterr().out
    assert "row bad, tp: `four` is not a whole number above 0" in page
    assert "3 rows, 1 predicted, 2 left out" in page and "SimuMax B200" in page


def test_a_file_that_is_no_such_table_says_why(tmp_path: Path) -> None:
    path = written(tmp_path, [row(), row(id="b")])
    text = path.read_text()
    for broken, message in (
        (text.replace(",tp,", ",tensor_parallel,"), "no column tp"),
        (text + '"c","00"\n', "row c .* has 2 cells, the head has 39"),
        (text.replace('"b"', '"a"'), "rows with one id: a"),
    ):
        path.write_text(broken)
        with pytest.raises(TableError, match=message):
            read_rows(path)
    with pytest.raises(TableError, match="No such file"):
        read_rows(tmp_path / "none.csv")


def test_columns_may_stand_in_any_order_and_unknown_ones_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["colour", *reversed(COLUMNS.split(","))]
    cells = row() | {"colour": "blue"}
    path = tmp_path / "turned.csv"
    path.write_text(",".join(names) + "\n" + ",".join(f'"{cells[name]}"' for name in names) + "\n")
    monkeypatch.setattr("sys.argv", ["planner", str(path)])
    assert planner.main() == 0
    page = capsys.readouterr().out
    assert "column colour is not used" in page and "1 predicted" in page


GOLDEN = {
    "model": "mcore-test:gpt/gpt3_mcore_te_tp1_pp4_vp1", "hf_id": "", "layers": "12", "hardware": "H100",
    "tp": "1", "pp": "4", "mbs": "4", "gbs": "32", "seq": "1024", "recompute": "none/see yaml", "notes": "",
    "mem_scope": "last rank only", "framework": "Megatron-LM d98e8a6 CI golden",
}


@pytest.mark.parametrize(("values", "gib"), [
    ({}, 3.875),  # three chunks, plain attention with dropout, whole optimizer on every rank
    ({"model": "mcore-test:gpt/gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap", "gbs": "40"}, 4.305),
    ({"model": "mcore-test:gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset", "pp": "1"}, 4.379),
    ({"model": "mcore-test:gpt/gpt3_mcore_te_tp2_pp2_mla", "layers": "4", "tp": "2", "pp": "2"}, 1.163),
    ({"model": "mcore-test:moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer",
      "tp": "2", "pp": "1", "ep": "2"}, 2.011),
    # One device and one step, whose moments begin when its activations are gone.
    ({"model": "mcore-test:gpt/gpt3_mcore_reruns_resume_check_grads", "layers": "32", "pp": "1", "mbs": "2",
      "gbs": "2", "seq": "512"}, 62.657),
])
def test_described_tests_of_a_framework_need_what_was_read(values: dict[str, str], gib: float) -> None:
    case = predict(row(**(GOLDEN | values | {"mem_alloc": str(gib)})), models())
    assert planner.memory_error(case) == pytest.approx(0, abs=0.01)


def test_a_test_of_the_framework_that_is_not_described_is_left_out() -> None:
    with pytest.raises(Skip, match="no configuration"):
        predict(row(**(GOLDEN | {"model": "mcore-test:gpt/none_such"})), models())


def test_a_reading_between_steps_is_compared_with_the_state() -> None:
    case = predict(row(
        model="Qwen3-30B-A3B", hf_id="Qwen/Qwen3-30B-A3B", layers="", hardware="H100", n_dev="16", tp="2",
        pp="2", ep="4", mbs="", gbs="", seq="", optimizer="adam, CPU offload 25%", mem_alloc="43.4",
        mem_unit="GB", mem_scope="steady allocated", framework="Megatron-Bridge", notes="",
    ), models())
    assert case.memory is not None and case.memory.lines["kept_activations"] == 0
    assert planner.memory_error(case) == pytest.approx(0, abs=0.01)
