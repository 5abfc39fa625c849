"""LoRA training step: Trimtab beside transformers + peft, in one process, as ratios.

    python benchmarks/lora_step.py --out benchmarks/results/lora_step.jsonl

Both sides train a rank-16 adapter on q_proj, k_proj, v_proj, o_proj of the `kimi-linear-tiny`
preset (same checkpoint, same tokens, float32, AdamW, one thread); Trimtab also trains
`k3.1-tiny`, a model of the same widths with latent experts, attention residuals and an indexer.
Before anything is timed the first loss of both sides must agree (the correctness gate). Then the
sides take turns; the medians and their ratio are printed and written with the peak memory of each
side in a fresh process of its own.

The peers must not find `fla` on a machine without an accelerator: the import is blocked here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.models.context import ForwardContext
from trimtab.models.lora import inject, lora_parameters
from trimtab.ops.cross_entropy import chunked_cross_entropy
from trimtab.train.memory import peak_memory_gib

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, ALPHA, LR = 16, 32, 1e-4
GATE = 1e-4  # relative difference of the first loss
Step = Callable[[], float]


def checkpoint(preset: str, folder: Path) -> Path:
    """A random checkpoint of a preset in the released format."""
    path = folder / preset
    config = preset_config(preset)
    init_checkpoint(load_arch(config, preset), config, path, seed=1)
    return path


def tokens(sequences: int, length: int) -> torch.Tensor:
    """[sequences, length] ids."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (sequences, length), generator=generator)


def trimtab_step(path: Path, ids: torch.Tensor) -> Step:
    """One step of ours; returns the mean token loss."""
    model, arch = load_model(path, base_dtype="fp32", compute_dtype=torch.float32)
    targets = resolve_targets(arch, target_modules=TARGETS, rank=RANK, alpha=ALPHA, dropout=0.0)
    inject(model, targets, seed=1)
    optimizer = torch.optim.AdamW(lora_parameters(model).values(), lr=LR, weight_decay=0.0)
    lengths = [ids.shape[1]] * ids.shape[0]
    flat = ids.flatten()
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[:, -1] = False
    rows = keep.flatten().nonzero().squeeze(1)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        hidden = model(flat, ForwardContext.packed(lengths))
        loss = chunked_cross_entropy(hidden[rows], model.head_weight, flat[rows + 1]) / len(rows)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def peer_step(path: Path, ids: torch.Tensor) -> Step:
    """One step of transformers + peft; returns the mean token loss."""
    for name in ("fla", "causal_conv1d", "kernels"):
        sys.modules[name] = None  # type: ignore[assignment]
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False
    )
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS)
    model = get_peft_model(base, config)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def timed(step: Step) -> float:
    """Wall seconds of one step."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def peak_gib(side: str, sequences: int, length: int) -> float:
    """Peak resident memory of a fresh process that runs two steps of one side."""
    command = [sys.executable, __file__, "--memory-of", side, "--shape", f"{sequences}x{length}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def sides(folder: Path, ids: torch.Tensor, only: str | None = None) -> dict[str, Step]:
    """The steps to compare, by name."""
    makers: dict[str, Callable[[], Step]] = {
        "transformers+peft kimi-linear-tiny": lambda: peer_step(
            checkpoint("kimi-linear-tiny", folder), ids
        ),
        "trimtab kimi-linear-tiny": lambda: trimtab_step(
            checkpoint("kimi-linear-tiny", folder / "ours"), ids
        ),
        "trimtab k3.1-tiny": lambda: trimtab_step(checkpoint("k3.1-tiny", folder), ids),
    }
    (folder / "ours").mkdir(exist_ok=True)
    return {name: make() for name, make in makers.items() if only in (None, name)}


def compare(shape: tuple[int, int], runs: int) -> list[dict[str, object]]:
    """Rows of one batch shape."""
    ids = tokens(*shape)
    with tempfile.TemporaryDirectory() as folder:
        steps = sides(Path(folder), ids)
        peer, ours, _ = steps
        losses = {name: step() for name, step in steps.items()}
        gap = abs(losses[ours] - losses[peer]) / losses[peer]
        if not gap <= GATE:
            raise SystemExit(f"correctness gate: first losses differ by {gap:.1e}: {losses}")
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(runs):
            for name, step in steps.items():
                times[name].append(timed(step))
    rows = []
    for name, seconds in times.items():
        ratios = [p / s for p, s in zip(times[peer], seconds, strict=True)]
        rows.append({
            "side": name, "sequences": shape[0], "length": shape[1], "runs": runs,
            "step_s_median": round(statistics.median(seconds), 4),
            "tokens_per_second": round(ids.numel() / statistics.median(seconds), 1),
            "speed_ratio_median": round(statistics.median(ratios), 2),
            "speed_ratio_min": round(min(ratios), 2),
            "peak_memory_gib": round(peak_gib(name, *shape), 3),
            "first_loss": losses[name],
        })
    return rows


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    import peft
    import transformers

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.date.today().isoformat(), "machine": platform.machine(),
        "cpu": cpu_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "peft": peft.__version__, "commit": commit.stdout.strip(), "threads": "1",
    }


def cpu_name() -> str:
    """Model name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=["1x1024", "8x128"])
    parser.add_argument("--memory-of")
    parser.add_argument("--shape", default="1x1024")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory_of:
        sequences, length = map(int, args.shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            (step,) = sides(Path(folder), tokens(sequences, length), args.memory_of).values()
            step()
            step()
        print(peak_memory_gib())
        return
    about = machine()
    for text in args.shapes:
        sequences, length = map(int, text.split("x"))
        for row in compare((sequences, length), args.runs):
            line = json.dumps({**row, **about})
            print(line)
            if args.out:
                with args.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
