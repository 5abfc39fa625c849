"""The experts operator: every implementation against the loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.compare import relative_error
from trimtab.arch.quantization import PackedForm
from trimtab.arch.spec import ActivationSpec
from trimtab.errors import OperatorError
from trimtab.ops import mxfp4
from trimtab.ops.backends import build_ops
from trimtab.ops.moe import experts, loop
from trimtab.ops.moe.experts import (
    experts_case,
    experts_grouped,
    experts_native,
    experts_workspace_bytes,
    supports_native,
)
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.lora import ExpertLoRA, Layout
from trimtab.ops.moe.reference import experts_reference
from trimtab.ops.moe.stored import DenseMatrices
from trimtab.ops.native.library import unavailable
from trimtab.ops.packed import DECODE, PackedMatrices
from trimtab.verify.tolerances import limit

E, A, RANK = 5, 2, 3
SITU = ActivationSpec("situ", 4.0, 25.0)
ACTIVATIONS = {
    "situ": SITU, "situ, linear up": ActivationSpec("situ", 4.0, None),
    "swiglu": ActivationSpec("swiglu"), "clamped swiglu": ActivationSpec("swiglu", clamp=0.5),
}
needs_native = pytest.mark.skipif(unavailable("moe") is not None, reason=str(unavailable("moe")))
FORMS = [
    pytest.param(experts_grouped, torch.float64, id="grouped-float64"),
    pytest.param(experts_grouped, torch.float32, id="grouped-float32"),
    pytest.param(experts_native, torch.float32, id="native-float32", marks=needs_native),
]
Run = Callable[[ExpertCall], Tensor]


class Inputs:
    """Leaves of a call in float64, which becomes a call in any dtype."""

    def __init__(
        self, tokens: int, width: int, inner: int, *, layout: Layout | None = None,
        split: bool = False, rate: float = 0.0, activation: ActivationSpec = SITU,
        pairs: tuple[bool, bool] = (True, True), trained: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(tokens + width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5

        shared, two = layout == "shared_outer", (2,) if split else ()
        self.leaves = {
            "x": normal(tokens, width), "weights": normal(tokens, A).abs(),
            "gate_up": normal(E, 2, inner, width), "down": normal(E, width, inner),
            "A1": normal(*(() if shared else (E,)), *two, RANK, width), "B1": normal(E, 2, inner, RANK),
            "A2": normal(E, RANK, inner), "B2": normal(*(() if shared else (E,)), width, RANK),
        }
        choice = [torch.randperm(E - 1, generator=generator)[:A] for _ in range(tokens)]
        self.ids = torch.stack(choice) if choice else torch.empty(0, A, dtype=torch.int64)
        self.ids[: tokens // 2, 0] = E - 1  # an uneven load
        self.layout, self.rate, self.activation, self.pairs = layout, rate, activation, pairs
        self.trained = trained

    def call(self, dtype: torch.dtype) -> tuple[ExpertCall, dict[str, Tensor]]:
        leaves = {name: leaf.to(dtype, copy=True) for name, leaf in self.leaves.items()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(self.trained or name not in ("gate_up", "down"))
        pairs = [
            ExpertLoRA(leaves[f"A{n}"], leaves[f"B{n}"], self.layout, 0.7 * n, self.rate, 5 + n)
            if self.layout is not None and self.pairs[n - 1] else None
            for n in (1, 2)
        ]
        token_ids = torch.arange(len(self.ids)) * 7 + 3
        return ExpertCall(
            leaves["x"], self.ids, leaves["weights"], DenseMatrices(leaves["gate_up"]),
            DenseMatrices(leaves["down"]), self.activation, pairs[0], pairs[1], token_ids,
        ), leaves


def outcome(run: Run, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The result and the gradient of every leaf that has one."""
    call, leaves = inputs.call(dtype)
    out = run(call)
    (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
    found = {"out": out.detach()}
    return found | {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}


def compare(run: Run, inputs: Inputs, dtype: torch.dtype) -> None:
    expected = outcome(experts_reference, inputs, torch.float64)
    found = outcome(run, inputs, dtype)
    assert set(found) == set(expected)
    most = limit(f"experts.{str(dtype).removeprefix('torch.')}")
    for name, value in found.items():
        assert relative_error(value, expected[name]) <= most, name


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, so that what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=[True, False], ids=["kept", "computed again"])
def kept(request, monkeypatch) -> bool:
    """Whether there is room to keep what activations are computed from."""
    if not request.param:
        monkeypatch.setattr(experts, "KEPT_BYTES", 0)
    return request.param


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(1, 8, 8), (65, 13, 7), (100, 16, 9)])
@pytest.mark.usefixtures("poisoned", "kept")
def test_a_frozen_base_gives_the_result_and_gradients_of_the_loop(run, dtype, activation, sizes):
    compare(run, Inputs(*sizes, activation=ACTIVATIONS[activation]), dtype)


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
@pytest.mark.usefixtures("poisoned", "kept")
def test_adapters_give_the_result_and_gradients_of_the_loop(run, dtype, layout, split, rate):
    compare(run, Inputs(63, 13, 10, layout=layout, split=split, rate=rate), dtype)


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_token_numbers_may_lie_apart(run, dtype, layout):
    call, _ = Inputs(9, 8, 6, layout=layout, rate=0.5).call(dtype)
    apart = torch.stack([call.token_ids, torch.zeros(9, dtype=torch.int64)], -1)[:, 0]
    assert torch.equal(run(replace(call, token_ids=apart)), run(call))


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.parametrize("pairs", [(True, False), (False, True)])
@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_one_of_the_two_matrices_may_have_an_adapter(run, dtype, layout, pairs):
    compare(run, Inputs(9, 8, 6, layout=layout, pairs=pairs), dtype)


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.usefixtures("poisoned", "kept")
def test_a_trained_base_gets_its_gradient(run, dtype):
    compare(run, Inputs(40, 12, 9, layout="per_expert", trained=True), dtype)


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.parametrize("choice", [(2, 4), (3, E)], ids=["two experts", "one expert"])
@pytest.mark.usefixtures("poisoned", "kept")
def test_all_tokens_on_the_same_experts_in_more_than_one_block(run, dtype, choice, monkeypatch):
    monkeypatch.setattr(loop, "_BUFFER_BYTES", 1)  # blocks of the least size, 128 rows
    inputs = Inputs(150, 8, 4, layout="per_expert")
    inputs.ids = torch.tensor([choice] * 150)
    compare(run, inputs, dtype)


@pytest.mark.parametrize(("run", "dtype"), FORMS)
@pytest.mark.parametrize("layout", [None, "per_expert", "shared_outer"])
def test_no_tokens(run, dtype, layout):
    call, leaves = Inputs(0, 8, 4, layout=layout).call(dtype)
    out = run(call)
    out.sum().backward()
    assert out.shape == (0, 8)
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves.values())


@pytest.mark.parametrize(("run", "dtype"), FORMS)
def test_ids_of_no_expert_count_for_nothing(run, dtype):
    inputs = Inputs(11, 8, 6, layout="shared_outer")
    inputs.ids[3] = E
    inputs.ids[5, 1] = E
    compare(run, inputs, dtype)
    found = outcome(run, inputs, dtype)
    assert not found["out"][3].any()
    assert not found["weights"][3].any()


@needs_native
def test_the_number_of_threads_changes_no_bit():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            inputs = Inputs(65, 40, 24, layout="per_expert", rate=0.2)
            results.append(outcome(experts_native, inputs, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize("run", [experts_grouped, pytest.param(experts_native, marks=needs_native)])
def test_bfloat16_activations_are_rounded_once(run):
    call, _ = Inputs(17, 16, 8, layout="per_expert").call(torch.float32)
    half = replace(call, x=call.x.detach().to(torch.bfloat16))
    exact = run(replace(call, x=half.x.to(torch.float32)))
    assert torch.equal(run(half), exact.to(torch.bfloat16))


@pytest.mark.parametrize("run", [experts_grouped, pytest.param(experts_native, marks=needs_native)])
@pytest.mark.usefixtures("poisoned", "kept")
def test_bfloat16_weights_compute_what_their_float32_values_compute(run):
    call, leaves = Inputs(33, 13, 10).call(torch.float32)
    narrow = [DenseMatrices(leaves[name].to(torch.bfloat16)) for name in ("gate_up", "down")]
    wide = [DenseMatrices(matrices.weight.to(torch.float32)) for matrices in narrow]
    results = []
    for gate_up, down in (narrow, wide):
        out = run(replace(call, gate_up=gate_up, down=down))
        results.append([out, *torch.autograd.grad(out.square().sum(), (leaves["x"], leaves["weights"]))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def in_mxfp4(call: ExpertCall) -> tuple[ExpertCall, ExpertCall]:
    """A call with packed matrices, and with what these decode to."""
    packed, dense = [], []
    for parts, matrices in ((2, call.gate_up), (1, call.down)):
        codes, scale = mxfp4.encode(matrices.tensors[0].detach())
        tensors = codes.flatten(1, -2), scale.flatten(1, -2)
        packed.append(PackedMatrices(*tensors, PackedForm("mxfp4", (1, 32)), parts))
        dense.append(DenseMatrices(mxfp4.decode(codes, scale, torch.float32)))
    return tuple(replace(call, gate_up=pair[0], down=pair[1]) for pair in (packed, dense))


@pytest.mark.parametrize("run", [experts_grouped, pytest.param(experts_native, marks=needs_native)])
@pytest.mark.parametrize("layout", [None, "per_expert"])
@pytest.mark.usefixtures("poisoned", "kept")
def test_packed_experts_compute_what_their_decoded_form_computes(run, layout):
    call, leaves = Inputs(33, 32, 32, layout=layout).call(torch.float32)
    trained = {n: leaf for n, leaf in leaves.items() if leaf.requires_grad}
    results = []
    for each in in_mxfp4(call):
        out = run(each)
        used = trained if layout else {n: trained[n] for n in ("x", "weights")}
        results.append([out, *torch.autograd.grad(out.square().sum(), used.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_packed_matrix_is_decoded_once_per_expert_and_pass(kept, monkeypatch):
    monkeypatch.setattr(loop, "_BUFFER_BYTES", 1)  # 128 rows: three blocks for each of two experts
    decoded: list[tuple[int, int]] = []
    matrix = PackedMatrices.matrix

    def counted(self, expert, *args):
        decoded.append((self.num_parts, expert))
        return matrix(self, expert, *args)

    monkeypatch.setattr(PackedMatrices, "matrix", counted)
    inputs = Inputs(300, 32, 32)
    inputs.ids = torch.tensor([[0, 2]] * 300)
    out = experts_grouped(in_mxfp4(inputs.call(torch.float32)[0])[0])
    each = [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert sorted(decoded) == each
    decoded.clear()
    out.sum().backward()
    assert sorted(decoded) == each


def test_a_forced_way_to_decode_is_the_one_inside_the_operator():
    codes, scale = torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 4, 1, dtype=torch.uint8)
    form, forced = PackedForm("mxfp4", (1, 32)), DECODE.force("reference")
    for decode, names in ((forced, ["reference"]), (DECODE, ["native", "reference"])):
        key = PackedMatrices(codes, scale, form, 1, decode).key
        again = PackedMatrices.from_key(key, codes, scale).decode
        assert [way.name for way in again.implementations] == names


@pytest.mark.parametrize("layout", [None, "per_expert", "shared_outer"])
def test_the_operator_is_sound_for_torch(layout):
    inputs = Inputs(5, 8, 4, layout=layout)
    seen: list[tuple[object, ...]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.trimtab.experts_fwd.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Watch():
        experts_grouped(inputs.call(torch.float64)[0])
    torch.library.opcheck(
        torch.ops.trimtab.experts_fwd.default, seen[0],
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_flops_are_those_of_the_products(kept):
    tokens, width, inner = 10, 16, 8
    rows = tokens * A
    for layout, low in (
        (None, 0),
        ("per_expert", rows * RANK * (width + 2 * inner + inner + width)),
        ("shared_outer", RANK * (tokens * width + rows * 2 * inner + rows * inner + tokens * width)),
    ):
        call, _ = Inputs(tokens, width, inner, layout=layout).call(torch.float64)
        base = rows * 3 * width * inner
        with FlopCounterMode(display=False) as counter:
            out = experts_grouped(call)
        assert counter.get_total_flops() == 2 * (base + low)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        again = 0 if kept else base * 2 // 3
        assert counter.get_total_flops() == 2 * (base + again + 3 * low)


def test_workspace_does_not_hold_the_rows_of_all_experts():
    call, _ = Inputs(4000, 64, 64).call(torch.float32)
    case = experts_case(call)
    assert experts_workspace_bytes(case) < 4 * 4000 * A * (64 + 2 * 64 + 64)


def mxfp4_matrices(**changes: Tensor) -> PackedMatrices:
    """Down of width 32 from 32 features, with tensors changed."""
    tensors = {"packed": torch.zeros(E, 8, 16, dtype=torch.uint8), "scale": torch.zeros(E, 8, 1, dtype=torch.uint8)}
    return PackedMatrices(**(tensors | changes), form=PackedForm("mxfp4", (1, 32)), num_parts=1)


@pytest.mark.parametrize(("change", "where"), [
    ({"x": torch.zeros(9, 7)}, "experts.gate_up"),
    ({"x": torch.zeros(9)}, "experts.x"),
    ({"x": torch.zeros(9, 8, dtype=torch.int64)}, "experts.x"),
    ({"ids": torch.zeros(9, 2)}, "experts.ids"),
    ({"ids": torch.zeros(8, 2, dtype=torch.int64)}, "experts.ids"),
    ({"weights": torch.zeros(8, 2)}, "experts.weights"),
    ({"weights": torch.zeros(9, 2, dtype=torch.int64)}, "experts.weights"),
    ({"gate_up": DenseMatrices(torch.zeros(E, 3, 4, 8))}, "experts.gate_up"),
    ({"down": DenseMatrices(torch.zeros(E, 8, 5))}, "experts.down"),
    ({"down": DenseMatrices(torch.zeros(E - 1, 8, 6))}, "experts.down"),
    ({"down": DenseMatrices(torch.zeros(E, 8, 6, dtype=torch.int8))}, "experts.down"),
    ({"down": mxfp4_matrices(packed=torch.zeros(E, 8, 16))}, "experts.down.packed"),
    ({"down": mxfp4_matrices(packed=torch.zeros(E, 8, 8, dtype=torch.uint8))}, "experts.down.packed"),
    ({"down": mxfp4_matrices(scale=torch.zeros(E, 7, 1, dtype=torch.uint8))}, "experts.down.scale"),
    ({"down": mxfp4_matrices(scale=torch.zeros(E, 8, 1))}, "experts.down.scale"),
    ({"lora_down": ExpertLoRA(torch.zeros(E, 3, 6), torch.zeros(8, 3), "per_expert", 1.0)},
     "experts.lora_down.B"),
    ({"lora_down": ExpertLoRA(torch.zeros(E, 3, 6), torch.zeros(8, 3), "shared_outer", 1.0)},
     "experts.lora_down.layout"),
    ({"lora_down": ExpertLoRA(torch.zeros(E, 3, 6, dtype=torch.int8), torch.zeros(E, 8, 3), "per_expert", 1.0)},
     "experts.lora_down.A"),
    ({"token_ids": None, "lora_down": ExpertLoRA(torch.zeros(E, 3, 6), torch.zeros(E, 8, 3),
                                                 "per_expert", 1.0, 0.5)}, "experts.token_ids"),
])
def test_wrong_arguments_are_named(change, where):
    call, _ = Inputs(9, 8, 6, layout="per_expert").call(torch.float32)
    with pytest.raises(OperatorError) as caught:
        build_ops().experts(replace(call, **change))
    assert caught.value.where == where


def test_the_choice_and_its_reasons():
    call, _ = Inputs(9, 8, 6).call(torch.float64)
    assert "float32" in str(supports_native(experts_case(call)))
    chosen = [c.name for c in build_ops().experts.explain(experts_case(call)) if c.chosen]
    assert chosen == ["grouped"]
    forced = build_ops({"experts": "reference"}).experts(call)
    assert relative_error(build_ops().experts(call), forced) <= limit("experts.float64")
