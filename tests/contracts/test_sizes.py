"""Files and functions stay small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "trimtab"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# `file.py:function` with the reason beside it; empty is the aim.
ALLOWED_FUNCTIONS: dict[str, str] = {}


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(SRC)): len(p.read_text().splitlines()) for p in SRC.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long: dict[str, int] = {}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                name = f"{path.relative_to(SRC)}:{node.name}"
                if length > MAX_FUNCTION_LINES and name not in ALLOWED_FUNCTIONS:
                    long[name] = length
    assert long == {}


def test_no_module_is_called_utils() -> None:
    assert [path for path in SRC.rglob("*.py") if path.stem in ("utils", "helpers", "misc")] == []
