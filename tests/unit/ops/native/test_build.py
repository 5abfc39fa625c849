"""Native libraries: built once, found again, repaired when damaged, and optional."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.errors import RunError
from trimtab.ops.native import build as build_module
from trimtab.ops.native.build import BuildError, build, compiler
from trimtab.ops.native.library import SWITCH, library, unavailable

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
SOURCE = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "sources" / "sample.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE % 42)
    return path


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def no_compiling(*_: object) -> None:
    raise AssertionError("compiled although the cache has it")


@needs_compiler
def test_a_second_build_is_a_cache_hit(source, tmp_path, monkeypatch):
    first = build(source, tmp_path / "cache", "AVX2")
    monkeypatch.setattr(build_module, "_compile", no_compiling)
    assert build(source, tmp_path / "cache", "AVX2") == first
    assert answer(first) == 42


@needs_compiler
def test_sources_headers_and_vector_level_are_in_the_key(source, tmp_path):
    paths = [build(source, tmp_path / "cache", "DEFAULT")]
    source.write_text(SOURCE % 43)
    paths.append(build(source, tmp_path / "cache", "DEFAULT"))
    source.with_name("shared.h").write_text("// a header\n")
    paths.append(build(source, tmp_path / "cache", "DEFAULT"))
    paths.append(build(source, tmp_path / "cache", "another level"))
    assert len(set(paths)) == 3  # levels without flags of their own share the portable build
    assert answer(paths[1]) == 43


@needs_compiler
@pytest.mark.parametrize("damage", ["half", "empty", "no digest", "gone"])
def test_a_damaged_library_is_built_again(source, tmp_path, damage):
    path = build(source, tmp_path / "cache", "DEFAULT")
    if damage == "no digest":
        path.with_suffix(".sha256").unlink()
    elif damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    assert answer(build(source, tmp_path / "cache", "DEFAULT")) == 42
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".so", ".sha256", ".lock"}


@needs_compiler
def test_processes_that_build_at_once_compile_once(source, tmp_path):
    count = tmp_path / "count"
    wrapper = tmp_path / "counting"
    command = compiler()
    assert command is not None
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> "{count}"; sleep 0.3;; esac\n'
        f'exec {command[0]} "$@"\n'
    )
    wrapper.chmod(0o755)
    code = (
        "import sys, pathlib, ctypes\n"
        "from trimtab.ops.native.build import build\n"
        "path = build(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), 'DEFAULT')\n"
        "sys.exit(ctypes.CDLL(str(path)).answer() != 42)\n"
    )
    env = os.environ | {"CXX": str(wrapper)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(source), str(tmp_path / "cache")], env=env)
        for _ in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert count.read_text() == "x\n"


def test_without_a_compiler_the_reason_says_so(source, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(source, tmp_path / "cache", "DEFAULT")


@needs_compiler
def test_a_failed_compilation_leaves_nothing_and_names_the_error(source, tmp_path):
    source.write_text("this is no C++\n")
    with pytest.raises(BuildError, match=r"compiling sample.cpp failed: .*error"):
        build(source, tmp_path / "cache", "DEFAULT")
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".lock"}


@needs_compiler
def test_a_cache_others_can_write_to_is_refused(source, tmp_path):
    cache = tmp_path / "open"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="other users"):
        build(source, cache, "DEFAULT")


@needs_compiler
def test_a_cache_that_is_no_directory_is_a_reason(source, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildError, match="cannot be used"):
        build(source, blocked / "cache", "DEFAULT")


def test_the_switch_turns_native_kernels_off(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    reason = unavailable("no_such_kernel")
    assert reason is not None and SWITCH in reason
    with pytest.raises(RunError, match="TT605"):
        library("no_such_kernel")
