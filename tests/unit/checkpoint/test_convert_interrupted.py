"""A conversion that is killed, starved or fed bad bytes: it goes on, or says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint import tiny
from tests.unit.checkpoint.test_convert import DEGREES, MEMORY, files_of, run
from trimtab.arch.load import load_arch
from trimtab.checkpoint.convert import plan_conversion, resident_bytes, write_plan
from trimtab.checkpoint.direct import BlockFile
from trimtab.checkpoint.layout import Degrees, rank_layout
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.checkpoint.output import open_output
from trimtab.checkpoint.source import INDEX_NAME, open_source
from trimtab.checkpoint.stream import THREAD_BYTES, Pipeline, plan_file
from trimtab.cli.main import run as cli
from trimtab.errors import CheckpointError

# Kills itself at a system call that changes the disk, counted over all of them.
KILLED = """
import os, pathlib, signal, sys
left = int(sys.argv[1])
def dying(call):
    def counted(*args, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counted
for name in ("pwrite", "fsync", "fdatasync", "ftruncate", "unlink", "rmdir", "mkdir"):
    setattr(os, name, dying(getattr(os, name)))
pathlib.Path.replace = dying(pathlib.Path.replace)
pathlib.Path.unlink = dying(pathlib.Path.unlink)
from trimtab.arch.load import load_arch
from trimtab.checkpoint.convert import plan_conversion, resident_bytes, write_plan
from trimtab.checkpoint.layout import Degrees, rank_layout
from trimtab.checkpoint.output import open_output
from trimtab.checkpoint.source import open_source
source = open_source(sys.argv[2])
plan = plan_conversion(source, rank_layout(load_arch(source.config()), Degrees(2, 2, 2)))
memory = resident_bytes() + 25 * 2**20
write_plan(plan, open_output(sys.argv[3]), memory=memory, workers=2, keep_every=2**16)
assert "torch" not in sys.modules
print(1000000 - left)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K3 of 2 MB in two files with an index."""
    root = tmp_path_factory.mktemp("interrupted")
    config = tiny.k3_config()
    config["text_config"].update(vocab_size=4096)
    tiny.make(root / "m", config)
    tensors = load_file(root / "m" / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, root / "m" / file)
    (root / "m" / "model.safetensors").unlink()
    (root / "m" / "manifest.json").unlink()
    weight_map = {name: file for file, held in halves.items() for name in held}
    (root / "m" / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return root / "m"


def killed_at(call: int, src: Path, dst: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(call), str(src), str(dst)], env=env, check=False,
        capture_output=True, text=True, timeout=120,
    )


def hashes(root: Path) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files_of(root).items()}


def test_killed_anywhere_it_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    whole = killed_at(10**6, model, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stdout)
    draw = random.Random(20261201)
    kills = [draw.randrange(1, calls // 3) for _ in range(4)]
    for call in kills:
        assert killed_at(call, model, tmp_path / "killed").returncode == -signal.SIGKILL
        with pytest.raises(CheckpointError, match="TT305"):
            open_source(tmp_path / "killed")
    last = killed_at(10**6, model, tmp_path / "killed")
    assert last.returncode == 0, last.stderr
    assert int(last.stdout) < calls
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "whole")


def test_bytes_that_were_safe_are_not_written_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = failing_after(monkeypatch, 4)
    with pytest.raises(CheckpointError):
        run(model, tmp_path / "c", Degrees(), memory=small(), workers=1, keep_every=2**16)
    assert len(writes) == 5
    monkeypatch.undo()
    again = run(model, tmp_path / "c", Degrees(), memory=small(), workers=1, keep_every=2**16)
    assert again.resumed > 0 and again.finished
    run(model, tmp_path / "whole", Degrees())
    assert hashes(tmp_path / "c") == hashes(tmp_path / "whole")


class Zeros:
    """A planned tensor."""

    name, dtype, shape = "zeros", "U8", (2**20,)
    num_bytes = grain = 2**20

    def fill(self, begin: int, out: memoryview) -> None:
        out[:] = bytes(len(out))


class HalfBroken:
    """A sink that fails once and would go on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        self.calls.append(f"write {offset // len(block)}")
        if len(self.calls) == 5:
            time.sleep(0.2)  # all other blocks wait behind this one
            raise OSError(errno.EIO, "Input/output error")

    def keep(self, offset: int) -> None:
        self.calls.append("keep")


def test_nothing_behind_a_block_that_failed_counts_as_kept() -> None:
    sink = HalfBroken()
    with Pipeline(THREAD_BYTES + 5 * 2**16, 1, keep_every=2**16) as pipeline:
        plan = plan_file("f", [Zeros()])
        with pytest.raises(OSError, match="Input/output"):
            pipeline.write(plan, sink, moved=lambda _: None)
        assert sink.calls == ["write 0", "keep", "write 1", "keep", "write 2"]
        again = HalfBroken()
        again.calls = [""] * 5
        assert pipeline.write(plan, again, moved=lambda _: None).bytes == plan.size


def small() -> int:
    """Memory that leaves one thread blocks of some hundred KiB."""
    return resident_bytes() + 13 * 2**20


def failing_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Makes the disk full after so many blocks."""
    writes: list[int] = []
    write = BlockFile.write

    def limited(self: BlockFile, offset: int, block: memoryview) -> None:
        writes.append(offset)
        if len(writes) > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, offset, block)

    monkeypatch.setattr(BlockFile, "write", limited)
    return writes


def test_a_full_disk_names_file_and_tensor_and_keeps_finished_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_after(monkeypatch, 3)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        run(model, tmp_path / "c", DEGREES)
    assert caught.value.code == "TT311"
    assert "stage-" in caught.value.where and ".safetensors: " in caught.value.where
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 3
    assert (tmp_path / "c" / MARKER_NAME).exists()


def test_too_little_space_is_refused_before_the_first_byte(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="are free") as caught:
        run(model, tmp_path / "c", DEGREES)
    assert caught.value.code == "TT311" and not (tmp_path / "c").exists()


def interrupted(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing_after(patch, 3)
        with pytest.raises(CheckpointError):
            run(src, dst, DEGREES)


@pytest.mark.parametrize("change", ["content", "time only", "tensors"])
def test_a_changed_source_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    src = tmp_path / "src"
    shutil.copytree(model, src)
    interrupted(src, tmp_path / "c", monkeypatch)
    if change == "time only":
        os.utime(src / "a.safetensors", ns=(1, 1))
    else:
        tensors = load_file(src / "a.safetensors")
        name = sorted(tensors)[0]
        if change == "content":
            tensors[name].view(-1)[0] += 1
        save_file(dict(reversed(tensors.items())), src / "a.safetensors",
                  metadata={"by": change} if change == "tensors" else None)
    with pytest.raises(CheckpointError, match=r"has changed|source_fingerprint") as caught:
        run(src, tmp_path / "c", DEGREES)
    assert caught.value.code == "TT312"


def test_another_layout_into_the_same_directory_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(model, tmp_path / "c", monkeypatch)
    with pytest.raises(CheckpointError, match="degrees") as caught:
        run(model, tmp_path / "c", Degrees(ep=2))
    assert caught.value.code == "TT312"
    run(model, tmp_path / "c", DEGREES)
    with pytest.raises(CheckpointError, match="already holds something"):
        run(model, tmp_path / "c", Degrees(ep=2))


def test_two_processes_cannot_write_one_part(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(model, tmp_path / "c", monkeypatch)
    output = open_output(tmp_path / "c")
    with (
        output.lock("part-1-of-1"),
        pytest.raises(CheckpointError, match="another process is writing"),
    ):
        run(model, tmp_path / "c", DEGREES)


def spoiled(model: Path, root: Path, change: str) -> Path:
    shutil.copytree(model, root)
    tensors = load_file(root / "a.safetensors")
    scale = next(name for name in tensors if name.endswith("weight_scale"))
    norm = next(name for name in tensors if name.endswith("norm.weight"))
    if change == "NaN scale":
        tensors[scale].view(-1)[5] = 255
    elif change == "infinity":
        tensors[norm].view(-1)[3] = float("inf")
    elif change == "unknown tensor":
        tensors["model.surprise"] = torch.zeros(3)
        weight_map = json.loads((root / INDEX_NAME).read_text())
        weight_map["weight_map"]["model.surprise"] = "a.safetensors"
        (root / INDEX_NAME).write_text(json.dumps(weight_map))
    elif change == "duplicate tensor":
        other = load_file(root / "b.safetensors")
        save_file({**other, norm: tensors[norm]}, root / "b.safetensors")
    if change == "truncated file":
        with (root / "a.safetensors").open("r+b") as handle:
            handle.truncate((root / "a.safetensors").stat().st_size - 100)
    else:
        save_file(tensors, root / "a.safetensors")
    return root


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("NaN scale", "TT310", "a.safetensors: language_model"),
        ("infinity", "TT310", "a.safetensors: language_model"),
        ("unknown tensor", "TT303", "model.surprise: left over"),
        ("duplicate tensor", "TT308", "is in a.safetensors and in b.safetensors"),
        ("truncated file", "TT301", "a.safetensors"),
    ],
)
def test_bad_sources_are_named(
    model: Path, tmp_path: Path, change: str, code: str, words: str
) -> None:
    src = spoiled(model, tmp_path / "src", change)
    with pytest.raises(CheckpointError) as caught:
        run(src, tmp_path / "c", DEGREES)
    assert caught.value.code == code and words in caught.value.message


def test_an_unreadable_shard_names_file_and_tensor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(model)
    plan = plan_conversion(source, rank_layout(load_arch(source.config()), DEGREES))
    read, begun = os.preadv, 0

    def failing(handle: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal begun
        begun += 1
        if begun > 40:
            raise OSError(errno.EIO, "Input/output error")
        return read(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        write_plan(plan, open_output(tmp_path / "c"), memory=MEMORY, workers=1)
    assert caught.value.code == "TT301"
    assert ".safetensors: " in caught.value.where


def test_the_command_says_what_it_would_do_and_does_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text("parallel: {ep: 2, pp: 2, stages: [1, 3], dp_shard: 4}\n")
    command = ["convert", str(model), "--out", str(tmp_path / "c"), "--json"]
    command += ["--plan", str(tmp_path / "plan.yaml")]
    assert cli([*command, "--dry-run", "--part", "1/2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "c").exists() and len(said["hosts"]) == 2
    assert said["bytes"] == sum(host["bytes"] for host in said["hosts"]) == sum(said["files"].values())
    assert cli([*command, "--audit", "--memory", "1GB"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["passed"] and done["conversion"]["written"] == said["bytes"]
    layout = json.loads((tmp_path / "c" / "layout.json").read_text())
    assert layout["stages"] == [[0, 1], [1, 4]]
    assert {path.name for path in (tmp_path / "c").glob("*.safetensors")} == set(said["files"])
    assert cli(["convert", str(model), "--out", "x", "--layout", "logical", "--ep", "2"]) == 2
    assert cli(["convert", str(model), "--out", "x", "--part", "3/2"]) == 2
    assert cli(["convert", str(model), "--out", "x", "--memory", "lots"]) == 2
    capsys.readouterr()
    assert cli(["convert", str(model), "--out", str(tmp_path / "plan.yaml" / "c")]) == 2
    assert "plan.yaml: is a file" in capsys.readouterr().err
