"""Every parity case stays inside the tolerance table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import CASES, rows
from trimtab.verify.tolerances import limit

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("model", CASES)
def test_the_model_equals_its_reference(model: str, dtype: str, tmp_path: Path) -> None:
    found = list(rows(model, tmp_path, dtype))
    outside = [r for r in found if not r.measured <= limit(r.kind)]
    assert not outside
    assert len(found) >= 5
