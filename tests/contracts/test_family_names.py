"""A family's name stands where its release is described, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "trimtab"
FAMILY = re.compile(r"kimi|deepseek|glm|(?<![a-z])k[23](?![a-z0-9])", re.IGNORECASE)
# The mechanism is called after one of them.
MECHANISM = "Kimi Delta Attention"
# Readers, weight maps, presets and the two tables that dispatch to them; tokenizers, chat formats
# and image rules of releases; the demo, which names the preset it runs.
DESCRIBES = (
    "arch/readers/", "arch/maps/", "arch/presets/", "arch/load.py",
    "data/k3_", "data/chat.py", "data/images.py", "data/ranks.py", "data/tokenizer.py", "demo/",
)
# Docstrings may give a release as an example; code may not.
EXAMPLES_ALLOWED = ("arch/spec.py", "arch/summary.py", "arch/outline.py")


def files() -> Iterator[tuple[str, str]]:
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        if not name.startswith(DESCRIBES):
            yield name, path.read_text()


def without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value.value = ""
    return ast.unparse(tree)


def named_in(name: str, text: str) -> list[str]:
    text = without_docstrings(text) if name in EXAMPLES_ALLOWED else text.replace(MECHANISM, "")
    return FAMILY.findall(text)


def test_no_family_name_outside_the_description_of_its_release() -> None:
    found = {name: named_in(name, text) for name, text in files()}
    assert {name: words for name, words in found.items() if words} == {}
    assert len(found) > 100 and "models/mla.py" in found


@pytest.mark.parametrize("line", ["if family == 'kimi_k3': pass", "x = K3", "# as in GLM-5"])
def test_a_planted_name_is_found(line: str) -> None:
    assert named_in("models/mla.py", f"{line}\n")
    assert not named_in("models/mla.py", f'"""{MECHANISM}."""\nk = k32 + task3\n')
