"""Compile one C++ source into a shared library and keep it in a per-user cache.

A library's name carries a hash of its sources, the flags, the compiler and the machine, so a
changed source never meets an old build. Builds happen under a file lock into a temporary name and
are renamed when whole; a digest beside the library shows later damage before the loader maps it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPILE_LIMIT_S = 600
_FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
)
# What each vector level of torch's own detection allows the compiler to use.
_VECTOR_FLAGS = {"AVX2": ("-mavx2", "-mfma", "-mf16c"), "AVX512": ("-mavx2", "-mfma", "-mf16c")}


class BuildError(Exception):
    """The library cannot be built here; the text says why."""


def compiler() -> list[str] | None:
    """The C++ compiler as the start of a command line: `CXX`, else the first one on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        found = shutil.which(chosen[0])
        return None if found is None else [found, *chosen[1:]]
    for name in ("g++", "c++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            return [found]
    return None


def build(source: Path, cache: Path, vector_level: str) -> Path:
    """The library of `source`, compiled unless the cache already has it.

    Args:
        source: a `.cpp` file; headers (`*.h`) beside it are taken to be part of it.
        cache: directory of built libraries, made if missing.
        vector_level: instruction set, as `torch.backends.cpu.get_cpu_capability()` names it;
            levels without flags here compile portable code.

    Raises:
        BuildError: no compiler, a cache that is unusable or open to others, or a failed compilation.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler (set CXX or install g++)")
    flags = (*_FLAGS, *_VECTOR_FLAGS.get(vector_level, ()))
    try:
        _own(cache)
        library = cache / f"{source.stem}-{_key(source, command, flags)}.so"
        if not _whole(library):
            with _locked(library.with_suffix(".lock")):
                if not _whole(library):  # another process may have built it meanwhile
                    _compile([*command, *flags], source, library)
    except OSError as e:
        raise BuildError(f"the cache {cache} cannot be used: {e.strerror or e}") from e
    return library


def _own(cache: Path) -> None:
    """Make the cache, and refuse one in which another user could place a library."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = cache.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"the cache {cache} can be written by other users")


def _key(source: Path, command: list[str], flags: tuple[str, ...]) -> str:
    version = subprocess.run(
        [*command, "--version"], capture_output=True, check=False, timeout=COMPILE_LIMIT_S
    )
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((command, flags, platform.machine())).encode() + version.stdout)
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _whole(library: Path) -> bool:
    """Whether library and digest exist and agree: loading a cut file can kill the process."""
    try:
        return library.with_suffix(".sha256").read_text() == _digest(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _compile(command: list[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / "library.so"
        try:
            run = subprocess.run(
                [*command, "-o", str(made), str(source)], capture_output=True, text=True,
                check=False, timeout=COMPILE_LIMIT_S, stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"compiling {source.name} took over {COMPILE_LIMIT_S} s") from None
        if run.returncode:
            lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
            error = next((line for line in lines if "error" in line), lines[-1])
            raise BuildError(f"compiling {source.name} failed: {error.strip()}")
        seal = Path(directory) / "library.sha256"
        seal.write_text(_digest(made))
        made.replace(library)
        seal.replace(library.with_suffix(".sha256"))
