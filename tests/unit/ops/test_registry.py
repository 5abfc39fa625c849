"""The choice of an implementation: by device, dtype and shape, in order, forced on request."""

from __future__ import annotations

import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.ops.backends import build_ops
from trimtab.ops.registry import Implementation, OpCase, Operator


def _case(x: torch.Tensor) -> OpCase:
    return OpCase(x.device.type, x.dtype, {"T": x.shape[0]})


def _short_only(case: OpCase) -> str | None:
    return None if case.shapes["T"] < 10 else "takes fewer than 10 tokens"


DOUBLE: Operator[[torch.Tensor], str] = Operator(
    "double", _case,
    (Implementation("fast", lambda x: "fast", _short_only), Implementation("plain", lambda x: "plain")),
    {"T": 4},
)


def test_the_first_implementation_that_supports_the_shape_runs() -> None:
    assert DOUBLE(torch.zeros(3)) == "fast"
    assert DOUBLE(torch.zeros(30)) == "plain"


def test_a_forced_implementation_runs_or_says_why_it_cannot() -> None:
    assert DOUBLE.force("plain")(torch.zeros(3)) == "plain"
    with pytest.raises(ConfigError, match="fewer than 10 tokens") as caught:
        DOUBLE.force("fast")(torch.zeros(30))
    assert caught.value.code == "TT110"


def test_the_explanation_names_the_one_that_runs_and_why_the_others_do_not() -> None:
    short, long = (DOUBLE.explain(_case(torch.zeros(n))) for n in (3, 30))
    assert [(c.name, c.chosen, c.reason) for c in short] == [("fast", True, None), ("plain", False, None)]
    assert [(c.name, c.chosen) for c in long] == [("fast", False), ("plain", True)]
    assert long[0].reason == "takes fewer than 10 tokens"


def test_unknown_operators_and_implementations_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="kda"):
        build_ops({"kd": "chunk"})
    with pytest.raises(ConfigError, match="reference"):
        build_ops({"kda": "fastest"})


def test_every_operator_has_a_reference_that_runs_its_typical_case() -> None:
    for operator in build_ops().operators().values():
        case = OpCase("cpu", torch.float64, operator.typical)
        assert operator.force("reference").choose(case).name == "reference"
