"""`trimtab plan` as a user meets it: exit codes, JSON, errors, the written section."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trimtab.cli.main import run
from trimtab.config.load import load_recipe

ROOT = Path(__file__).parents[2]
EIGHT = ["--cluster", "h100", "--model", "CONFIG", "--devices", "8"]
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 32000,
    "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 8192,
}


def config(tmp_path: Path, **values: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | values))
    return str(path)


def test_a_config_and_a_cluster_name_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "parallel.yaml"
    words = ["plan", "--model", config(tmp_path), "--cluster", "h100", "--devices", "8"]
    assert run([*words, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"] and found["placement"] == "8 ranks = 1 host, 79.2 GiB each"
    assert found["trained_by_trimtab"] is False
    assert yaml.safe_load(out.read_text())["parallel"] == found["parallel"]
    assert run(words) == 0
    page = capsys.readouterr().out
    assert "8 ranks = 1 host" in page and "planned only" in page and "parallel:" in page


def test_nothing_fits_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = config(tmp_path, num_hidden_layers=400, hidden_size=8192, intermediate_size=32768)
    assert run(["plan", "--model", big, "--cluster", "h100", "--hosts", "1"]) == 3
    page = capsys.readouterr().out
    assert "no feasible plan" in page and "base weights" in page and "16 ranks" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--cluster: is required"),
        (["--cluster", "h100"], "--model: is required"),
        (["--cluster", "h100", "--model", "CONFIG"], "needs one of --devices"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "8", "--goal", "best"], "--goal (best)"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "8", "--targets", "qproj"], "TT501"),
        ([*EIGHT, "--pp", "2", "--stages", "8,9"], "add to 16 layers"),
        ([*EIGHT, "--stages", "8,8,x"], "add to 16 layers"),
        ([*EIGHT, "--tp", "3"], "--devices (8): must be a multiple of tp 3"),
        ([*EIGHT, "--pp", "2", "--tp", "8"], "must be a multiple of pp 2 * tp 8"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "32", "--tp", "32"],
         "--tp (32): tp * cp must divide the 16 heads"),
        (["--cluster", "h100", "--model", "CONFIG", "--devices", "32", "--pp", "32"], "at most 16, the layers"),
        ([*EIGHT, "--cp", "8", "--seq-len", "1028"], "--cp (8): must divide the 1028 tokens"),
        ([*EIGHT, "--ep", "2"], "--ep (2): must be 1: the model has no experts"),
        ([*EIGHT, "--pp", "1", "--tp", "1", "--cp", "1", "--tokens-per-step", "32768"], "8 data-parallel ranks"),
        (["--cluster", "h200", "--model", "kimi-k3", "--devices", "16", "--ep", "10"], "divide the 896 experts"),
        (["--cluster", "h200", "--model", "kimi-k3", "--devices", "16", "--ep", "7"], "divide the 16 ranks"),
        (["--cluster", "h201", "--model", "CONFIG", "--devices", "8"], "did you mean `h200`"),
        (["--cluster", "cpu", "--model", "CONFIG", "--devices", "8"], "cpu has 1 rank"),
    ],
)
def test_errors_name_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    path = config(tmp_path)
    assert run(["plan", *(path if word == "CONFIG" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_family_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, model_type="llamo")
    assert run(["plan", "--model", path, "--cluster", "h100", "--devices", "8"]) == 2
    assert "TT201" in capsys.readouterr().err


def test_packages_are_ranks_of_two_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", config(tmp_path), "--cluster", "ascend-a3", "--packages", "8", "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 16


RECIPE = f"""\
# Mine.
model: {{path: {ROOT}/src/trimtab/demo/base}}   # the base
cluster: h200
finetune:
  epochs: 2
  batch: {{tokens_per_step: 16384, micro_batch_tokens: 1024}}
  data:
    domain: {{path: {ROOT}/src/trimtab/demo/data/domain_train.jsonl}}
    general: {{path: {ROOT}/src/trimtab/demo/data/general_train.jsonl}}
    max_seq_len: 512
parallel: auto
output: runs/x
"""


def test_a_recipe_is_planned_as_a_whole_job_and_gets_its_section(tmp_path: Path) -> None:
    recipe, out, page = tmp_path / "r.yaml", tmp_path / "planned.yaml", tmp_path / "p.html"
    recipe.write_text(RECIPE)
    words = ["plan", str(recipe), "--devices", "8", "--price", "3", "--json", "--out", str(out),
             "--html", str(page)]
    # A process of its own, so that nothing else has imported torch.
    code = "import sys; from trimtab.cli.main import run; rc = run(sys.argv[1:]); " \
           "sys.exit(rc or 10 * ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    job = found["job"]
    assert job["steps"] * 16384 == job["tokens"] and "passes" in job["data"]
    assert job["total_hours"] == pytest.approx(sum(job["hours"].values())) and job["cost"] > 0
    assert "The whole job" in page.read_text() and "it ends" in page.read_text()
    assert list(tmp_path.glob("*.tmp")) == []
    text = out.read_text()
    assert text.startswith(RECIPE[:RECIPE.index("parallel")]) and text.endswith("output: runs/x\n")
    planned = load_recipe(out)
    assert planned.parallel.ranks == 8 and planned.parallel.ep == found["parallel"]["ep"]


def test_a_recipe_without_data_is_planned_by_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.replace(f"{ROOT}/src/trimtab/demo/data/domain_train", "nowhere"))
    words = ["plan", str(recipe), "--devices", "8", "--json"]
    assert run([*words, "--set", "finetune.steps=30", "--set", "finetune.epochs=null"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["job"]["steps"] == 30 and "not counted" in found.err
    assert run(words) == 2
    assert "finetune.epochs" in capsys.readouterr().err


def test_a_planned_recipe_is_not_yet_run_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.replace("parallel: auto", "parallel: {dp_shard: 8, ep: 4}"))
    assert run(["finetune", str(recipe), "--dry-run"]) == 2
    assert "several devices" in capsys.readouterr().err


def test_a_price_tells_the_cost_of_a_million_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", config(tmp_path), "--cluster", "h100", "--devices", "8"]
    assert run([*words, "--price", "3.6", "--json"]) == 0
    for layout in json.loads(capsys.readouterr().out)["layouts"]:
        cost = 8 * 3.6 / 3600 / layout["tokens_per_second"] * 1e6
        assert layout["cost_per_million_tokens"] == pytest.approx(cost)
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["cost_per_million_tokens"] is None
    for flag in ([], ["--serve"]):
        assert run([*words, "--price", "3.6", *flag]) == 0
        assert "USD per million tokens" in capsys.readouterr().out


def test_overrides_need_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "kimi-k3", "--set", "seed=1"]) == 2
    assert "--set" in (text := capsys.readouterr().err) and "needs a recipe" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapters", "2"], "needs --serve"),
        (["--serve", "--tp", "2"], "--tp (2): has no meaning beside --serve"),
        (["--serve", "--html", "x"], "--html (x): has no meaning"),
        (["--calibrate", "--cluster", "h200"], "--cluster (h200): has no meaning beside --calibrate"),
    ],
)
def test_flags_without_effect_are_errors(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_serving_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", config(tmp_path), "--cluster", "h100", "--devices", "8", "--serve"]
    assert run([*words, "--adapters", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adapters"] == 16 and found["layouts"][0]["requests"] > 0
    assert run(words) == 0
    page = capsys.readouterr().out
    assert "1 adapter," in page and "a token" in page and "caches" in page
    assert run(["plan", "--model", "kimi-k3", "--cluster", "h100", "--devices", "8", "--serve"]) == 3
    assert run([*words[:-1], "--adapters", "2"]) == 2
    assert "needs --serve" in capsys.readouterr().err


def test_a_calibration_goes_to_the_file_and_is_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | None] = []

    def measured(ranks: int | None, say: object) -> str:
        asked.append(ranks)
        return ("name: here\ntitle: here\ndevice: d\npackages_per_host: 2\nmemory_gib: 64\n"
                "bf16_tflops: 100\nmemory_gb_s: 1000\n")

    monkeypatch.setattr("trimtab.cli.plan_calibrate.calibrate", measured)
    out = tmp_path / "here.yaml"
    assert run(["plan", "--calibrate", "--devices", "2", "--out", str(out)]) == 0
    assert asked == [2] and capsys.readouterr().out == ""
    assert run(["plan", "--model", config(tmp_path), "--cluster", str(out), "--devices", "2"]) == 0
    assert "2 ranks = 1 host, 64 GiB each" in capsys.readouterr().out


def test_a_missing_field_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}))
    assert run(["plan", "--model", str(path), "--cluster", "h100", "--devices", "8"]) == 2
    assert "hidden_size: the field is missing" in capsys.readouterr().err


def test_stages_say_how_many_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", config(tmp_path), "--cluster", "h100", "--devices", "8", "--json"]
    assert run([*words, "--stages", "6,10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parallel"]["pp"] == 2 and found["parallel"]["stages"] == [6, 10]


def test_too_few_tokens_for_the_ranks_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", config(tmp_path, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)]
    assert run([*words, "--cluster", "h100", "--devices", "8", "--tokens-per-step", "8192"]) == 3
    assert "--tokens-per-step" in capsys.readouterr().out
