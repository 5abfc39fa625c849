"""A directory is either whole with a manifest, or known to be unfinished."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.checkpoint.manifest import (
    MANIFEST_NAME,
    read_manifest,
    require_free_space,
    verify_files,
    write_artefact,
    write_atomic,
)
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.errors import CheckpointError


def _write(dst: Path, fail: Exception | None = None) -> None:
    with write_artefact(dst, "test", source_fingerprint="f", extra={"a": 1}) as out:
        out.write("x.bin", b"12345")
        if fail is not None:
            raise fail
        with out.open("deep/y.bin") as handle:
            handle.write(b"abc")
            handle.write(memoryview(b"def"))


def test_written_directory_has_a_true_manifest(tmp_path: Path) -> None:
    _write(tmp_path / "d")
    manifest = read_manifest(tmp_path / "d")
    assert manifest is not None
    assert (manifest.kind, manifest.source_fingerprint, manifest.extra) == ("test", "f", {"a": 1})
    assert {n: r.bytes for n, r in manifest.files.items()} == {"x.bin": 5, "deep/y.bin": 6}
    names = {p.name for p in (tmp_path / "d").rglob("*") if p.is_file()}
    assert names == {"x.bin", "y.bin", MANIFEST_NAME}
    assert all(v.passed for v in verify_files(tmp_path / "d"))


@pytest.mark.parametrize("data", [b"1234", b"12346"])
def test_changed_file_is_found(tmp_path: Path, data: bytes) -> None:
    _write(tmp_path / "d")
    (tmp_path / "d/x.bin").write_bytes(data)
    bad = [v for v in verify_files(tmp_path / "d") if not v.passed]
    assert len(bad) == 1
    assert "x.bin" in bad[0].where


def test_missing_file_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "d")
    (tmp_path / "d/x.bin").unlink()
    assert [v.where for v in verify_files(tmp_path / "d") if not v.passed] == ["x.bin: missing"]


def test_crash_leaves_a_marker_and_the_next_run_succeeds(tmp_path: Path) -> None:
    dst = tmp_path / "d"
    with pytest.raises(RuntimeError):
        _write(dst, RuntimeError("killed"))
    assert (dst / MARKER_NAME).exists()
    with pytest.raises(CheckpointError) as caught:
        read_manifest(dst)
    assert caught.value.code == "TT305"
    _write(dst)
    assert all(v.passed for v in verify_files(dst))
    assert not (dst / MARKER_NAME).exists()


def test_a_kill_while_the_marker_is_written_leaves_a_directory_to_write_to(tmp_path: Path) -> None:
    dst = tmp_path / "d"
    dst.mkdir()
    (dst / f"{MARKER_NAME}.tmp").touch()
    _write(dst)
    assert all(v.passed for v in verify_files(dst))
    assert not list(dst.glob("*.tmp")) and not (dst / MARKER_NAME).exists()


def test_a_kill_while_a_file_is_written_leaves_nothing_behind_after_the_next_run(tmp_path: Path) -> None:
    dst = tmp_path / "d"
    with pytest.raises(RuntimeError):
        _write(dst, RuntimeError("killed"))
    name = next(p.name for p in dst.iterdir() if p.name != MARKER_NAME)
    (dst / f"{name}.tmp").write_bytes(b"half")
    with write_artefact(dst, "test") as out:
        out.write("z.bin", b"1")
    assert sorted(p.name for p in dst.iterdir()) == [MANIFEST_NAME, "z.bin"]


def test_restart_removes_only_its_own_files(tmp_path: Path) -> None:
    dst = tmp_path / "d"
    with pytest.raises(RuntimeError):
        _write(dst, RuntimeError("killed"))
    (dst / "notes.txt").write_text("mine")
    with write_artefact(dst, "test") as out:
        out.write("z.bin", b"1")
    assert sorted(p.name for p in dst.iterdir() if p.is_file()) == [MANIFEST_NAME, "notes.txt", "z.bin"]


def test_bad_input_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        _write(tmp_path / "d", CheckpointError("TT310", "x", "is NaN"))
    assert not (tmp_path / "d").exists()


def test_existing_output_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("1")
    with pytest.raises(CheckpointError) as caught:
        _write(tmp_path)
    assert caught.value.code == "TT309"
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(CheckpointError):
        _write(tmp_path / "mine")


def test_foreign_directory_has_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    with pytest.raises(CheckpointError, match="nothing to check against"):
        verify_files(tmp_path)


@pytest.mark.parametrize("text", ['{"format_version": 99}', "[]", '{"format_version": 1}'])
def test_other_manifests_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert caught.value.code == "TT306"


def test_interrupted_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"


def test_disk_space_is_checked_first(tmp_path: Path) -> None:
    require_free_space(tmp_path / "a/b", 1)
    with pytest.raises(CheckpointError) as caught:
        require_free_space(tmp_path / "a/b", 2**60)
    assert caught.value.code == "TT311"
