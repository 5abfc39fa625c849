"""What is built and installed elsewhere is whole: code, data, licences, and no more than that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "trimtab"


def run(arguments: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source distribution, by suffix."""
    out = tmp_path_factory.mktemp("dist")
    build = run(["-m", "hatchling", "build", "-d", str(out)], ROOT)
    assert build.returncode == 0, build.stderr
    return {path.suffix: path for path in out.iterdir()}


def test_the_wheel_holds_every_file_of_the_package(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("trimtab/")}
        licences = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    files = (path for path in SRC.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {f"trimtab/{path.relative_to(SRC).as_posix()}" for path in files}
    assert len(licences) == 1


def test_the_source_distribution_holds_only_what_git_knows(built: dict[str, Path]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    if listed.returncode:
        pytest.skip("this checkout is not a git repository")
    with tarfile.open(built[".gz"]) as source:
        packed = {member.name.partition("/")[2] for member in source if member.isfile()}
    assert packed - {"PKG-INFO"} <= set(listed.stdout.splitlines())
    assert {"README.md", "LICENSE", "pyproject.toml", "Makefile"} <= packed


def test_an_installed_wheel_works_outside_the_repository(
    built: dict[str, Path], tmp_path: Path
) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    installed = run([*pip, str(built[".whl"])], elsewhere)
    assert installed.returncode == 0, installed.stderr
    where = run(["-c", "import trimtab; print(trimtab.__file__)"], elsewhere, PYTHONPATH=str(site))
    assert Path(where.stdout.strip()).is_relative_to(site)
    version = run(["-m", "trimtab", "--version"], elsewhere, PYTHONPATH=str(site))
    assert version.stdout == f"trimtab {project()['version']}\n"
    shown = run(
        ["-m", "trimtab", "inspect", "k3.1-tiny", "--json"], elsewhere, PYTHONPATH=str(site)
    )
    assert json.loads(shown.stdout)["model_type"] == "kimi_k3"
    script = run([str(site / "bin" / "trimtab"), "inspect", "--list"], elsewhere,
                 PYTHONPATH=str(site))
    assert "kimi-linear-48b" in script.stdout


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line[:1] not in ("", "#")]
    assert all(found), "a constraint is `name==version`, without a local suffix"
    return {normal(match[1]): match[2] for match in found if match}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_tested_versions_lie_within_the_declared_ranges() -> None:
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = text["optional-dependencies"]
    tested_extras = [name for name in extras if name != "s3"]
    declared = [*text["dependencies"], *(line for name in tested_extras for line in extras[name])]
    tested = pins()
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(tested[normal(requirement.name)]), requirement
