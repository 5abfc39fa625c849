"""Fast and single-step KDA against the recurrence: outputs, states and every gradient."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tests.oracles.naive_ops import kda_recurrence
from tests.support.compare import relative_error
from trimtab.errors import ConfigError, OperatorError
from trimtab.ops.backends import build_ops
from trimtab.ops.kda import chunk, native, scores
from trimtab.ops.kda.chunk import kda_chunk
from trimtab.ops.kda.native import kda_native
from trimtab.ops.kda.pair import kda_flops
from trimtab.ops.kda.recurrent import kda_step
from trimtab.ops.kda.reference import kda_reference
from trimtab.ops.native import library as library_module
from trimtab.ops.native.build import build
from trimtab.ops.native.library import SWITCH, unavailable
from trimtab.ops.norm import l2_norm
from trimtab.ops.registry import OpCase
from trimtab.verify.tolerances import limit

HEADS, KEY, VALUE, SCALE = 2, 8, 6, 0.3
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
PACKS = ([1], [2, 1], [31], [32], [33, 0, 65], [100, 1, 0, 63, 7])

needs_native = pytest.mark.skipif(
    unavailable("kda") is not None, reason=f"native kernel: {unavailable('kda')}"
)
FAST = [
    pytest.param(kda_native, marks=needs_native, id="native"), pytest.param(kda_chunk, id="chunk"),
]


def inputs(
    lengths: list[int], gate: float, dtype: torch.dtype, key: int = KEY, value: int = VALUE
) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    q, k = (l2_norm(draw(1, total, HEADS, key)) for _ in range(2))
    v = draw(1, total, HEADS, value)
    g = -gate * torch.rand(1, total, HEADS, key, generator=generator, dtype=torch.float64)
    beta = torch.sigmoid(draw(1, total, HEADS))
    state = draw(len(lengths), HEADS, key, value)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)], cu_seqlens


def run(op, tensors: list[Tensor], cu_seqlens: Tensor, **kwargs) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, final = op(*leaves[:5], SCALE, leaves[5], True, cu_seqlens, **kwargs)
    ramp = torch.linspace(-1, 1, out.numel(), dtype=final.dtype).view_as(out)
    (out.mul(ramp).sum() + final.square().sum()).backward()
    grads = {f"d{n}": x.grad for n, x in zip(NAMES, leaves, strict=True)}
    return {"output": out, "final": final, **grads}


def assert_in_the_table(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    for name, value in expected.items():
        what = "gradients" if name.startswith("d") else "output"
        assert relative_error(found[name], value) <= limit(f"kda.{what}.float32{kind}"), name


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("bound", [None, -5.0])
def test_chunked_kda_equals_the_recurrence_in_float64(lengths, bound):
    tensors, cu = inputs(lengths, 5.0, torch.float64)
    expected = run(kda_reference, tensors, cu)
    found = run(kda_chunk, tensors, cu, gate_bound=bound)
    for name, value in expected.items():
        assert relative_error(found[name], value) <= limit("kda.output.float64"), name


@pytest.mark.parametrize("op", FAST)
@pytest.mark.parametrize(
    ("gate", "bound", "kind"),
    [(0.01, -5.0, ""), (5.0, -5.0, ""), (5.0, None, ""), (60.0, None, ".hard")],
)
def test_float32_stays_in_the_table(op, gate, bound, kind):
    tensors, cu = inputs([130, 70], gate, torch.float32)
    expected = run(kda_reference, doubles(tensors), cu)
    assert_in_the_table(run(op, tensors, cu, gate_bound=bound), expected, kind)


@needs_native
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_the_native_kernel_is_right_for_odd_lengths(lengths):
    tensors, cu = inputs(lengths, 5.0, torch.float32)
    assert_in_the_table(run(kda_native, tensors, cu), run(kda_reference, doubles(tensors), cu), "")


@needs_native
@pytest.mark.parametrize(("key", "value"), [(32, 128), (64, 64), (128, 32), (17, 1)])
def test_the_native_kernel_is_right_for_other_head_sizes(key, value):
    tensors, cu = inputs([65, 40], 5.0, torch.float32, key, value)
    assert_in_the_table(run(kda_native, tensors, cu), run(kda_reference, doubles(tensors), cu), "")


@pytest.mark.parametrize("op", FAST)
def test_states_of_segments_serve_long_sequences(op):
    tensors, cu = inputs([700, 0, 300], 0.2, torch.float32)
    assert_in_the_table(run(op, tensors, cu), run(kda_reference, doubles(tensors), cu), "")


@pytest.mark.parametrize("op", FAST)
def test_gates_far_below_the_floor_give_finite_gradients(op):
    tensors, cu = inputs([70], 5.0, torch.float32)
    tensors[3] = tensors[3] * 2000
    found = run(op, tensors, cu)
    for name, value in found.items():
        assert torch.isfinite(value).all(), name
    assert (found["dg"][tensors[3] < -80] == 0).all()


@pytest.mark.parametrize("op", FAST)
def test_bfloat16_inputs_are_widened_and_gradients_come_back_in_it(op):
    tensors, cu = inputs([130], 5.0, torch.float32)
    narrow = [x.bfloat16() for x in tensors[:3]] + tensors[3:]
    widened = [x.float() if x.dtype is torch.bfloat16 else x for x in narrow]
    expected = run(op, widened, cu)
    found = run(op, narrow, cu)
    for name, value in expected.items():
        assert relative_error(found[name].to(value.dtype), value) <= limit("kda.bfloat16"), name
    assert [found[f"d{n}"].dtype for n in NAMES[:4]] == [torch.bfloat16] * 3 + [torch.float32]


@pytest.mark.parametrize("op", FAST)
def test_fresh_buffers_are_never_read(op, monkeypatch):
    tensors, cu = inputs([33, 0, 300], 5.0, torch.float32)
    expected = run(op, tensors, cu)
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, plain=plain, **k: poison(plain(*a, **k)))
    plain_new = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(plain_new(*a, **k)))
    for name, value in run(op, tensors, cu).items():
        assert torch.equal(value, expected[name]), name


def poison(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


@needs_native
def test_the_number_of_threads_does_not_change_a_bit():
    tensors, cu = inputs([70, 300, 5], 5.0, torch.float32)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run(kda_native, tensors, cu))
    finally:
        torch.set_num_threads(before)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@needs_native
def test_portable_code_computes_the_same(monkeypatch, tmp_path):
    source = Path(library_module.__file__).with_name("kda.cpp")
    portable = ctypes.CDLL(str(build(source, tmp_path / "cache", "DEFAULT")))
    tensors, cu = inputs([70, 300, 5], 5.0, torch.float32)
    monkeypatch.setattr(native, "library", lambda name: portable)
    assert_in_the_table(run(kda_native, tensors, cu), run(kda_reference, doubles(tensors), cu), "")


def test_without_native_kernels_pytorch_runs_and_the_reason_is_shown(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    tensors, cu = inputs([40], 5.0, torch.float32)
    op = build_ops().kda
    choices = {c.name: c for c in op.explain(op.case(*tensors[:5]))}
    assert not choices["native"].chosen and SWITCH in str(choices["native"].reason)
    assert choices["chunk"].chosen
    expected, _ = kda_chunk(*tensors[:5], SCALE, None, False, cu)
    assert torch.equal(op(*tensors[:5], SCALE, None, False, cu)[0], expected)
    with pytest.raises(ConfigError, match=SWITCH):
        build_ops({"kda": "native"}).kda(*tensors[:5], SCALE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_leave_the_native_kernel_with_a_reason(dtype):
    case = OpCase("cpu", dtype, {"B": 1, "T": 64, "H": 2, "K": 64, "V": 64})
    assert "float32" in str(native.supports(case))
    assert "cuda" in str(native.supports(OpCase("cuda", torch.float32, case.shapes)))


def test_the_reference_equals_an_independent_recurrence():
    tensors, _ = inputs([17], 5.0, torch.float64)
    q, k, v, g, beta, state = tensors
    out, final = kda_reference(q, k, v, g, beta, SCALE, state, True)
    other, other_state = kda_recurrence(SCALE * q[0], k[0], v[0], g[0], beta[0], state[0])
    assert relative_error(out[0], other) <= limit("kda.output.float64")
    assert relative_error(final[0], other_state) <= limit("kda.output.float64")


@pytest.mark.parametrize("op", FAST)
def test_a_batch_without_borders_is_independent_sequences(op):
    tensors, cu = inputs([40, 40], 5.0, torch.float32)
    flat, _ = op(*tensors[:5], SCALE, None, False, cu)
    batched = [x.view(2, 40, *x.shape[2:]) for x in tensors[:5]]
    out, _ = op(*batched, SCALE)
    assert torch.equal(out.flatten(0, 1), flat[0])


@pytest.mark.parametrize("op", FAST)
def test_documents_of_a_pack_do_not_leak(op):
    tensors, cu = inputs([37, 41, 20], 5.0, torch.float32)
    before = run(op, tensors, cu)
    for x in tensors[:5]:
        x[:, 37:78] = float("nan")
    tensors[5][1] = float("nan")
    after = run(op, tensors, cu)
    for name, value in before.items():
        rows = ([0, 2],) if name in ("final", "dinitial_state") else (0, [*range(37), *range(78, 98)])
        assert torch.equal(value[rows], after[name][rows]), name


@pytest.mark.parametrize("op", FAST)
def test_prefill_in_pieces_equals_one_pass(op):
    kind = torch.float64 if op is kda_chunk else torch.float32
    tolerance = limit("kda.output.float64" if op is kda_chunk else "kda.output.float32")
    tensors, _ = inputs([90], 5.0, kind)
    whole, final = op(*tensors[:5], SCALE, tensors[5], True)
    state, pieces = tensors[5], []
    for begin, end in ((0, 1), (1, 40), (40, 89), (89, 90)):
        part = [x[:, begin:end] for x in tensors[:5]]
        out, state = op(*part, SCALE, state, True)
        pieces.append(out)
    assert relative_error(torch.cat(pieces, 1), whole) <= tolerance
    assert relative_error(state, final) <= tolerance


def test_a_single_step_equals_the_recurrence():
    tensors, _ = inputs([3, 3], 5.0, torch.float64)
    state = tensors[5]
    expected, final = kda_reference(
        *(x.view(2, 3, *x.shape[2:]) for x in tensors[:5]), SCALE, state, True
    )
    for t in range(3):
        step = [x.view(2, 3, *x.shape[2:])[:, t] for x in tensors[:5]]
        out, state = kda_step(*step, SCALE, state)
        assert relative_error(out, expected[:, t]) <= limit("kda.output.float64")
    assert relative_error(state, final) <= limit("kda.output.float64")


def test_scores_of_any_gate_and_of_a_bounded_gate_agree():
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, 32, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    cum = (-5 * torch.rand(3, 32, 8, generator=generator, dtype=torch.float64)).cumsum(-2)
    exact, fast = (scores.scores(q, k, cum, bounded) for bounded in (False, True))
    assert relative_error(fast, exact) <= limit("kda.output.float64")
    assert scores.bounded(-5.0) and not scores.bounded(-5.1) and not scores.bounded(None)


@pytest.mark.parametrize("op", [*FAST, pytest.param(kda_reference, id="reference")])
@pytest.mark.parametrize(
    ("argument", "spoil"),
    [
        ("kda.q", lambda a: a | {"q": a["q"][:, :, :1]}),
        ("kda.k", lambda a: a | {"k": a["k"][0]}),
        ("kda.v", lambda a: a | {"v": a["v"][:, 1:]}),
        ("kda.g", lambda a: a | {"g": a["g"][..., 1:]}),
        ("kda.g", lambda a: a | {"g": a["g"] + 1e3}),
        ("kda.beta", lambda a: a | {"beta": a["beta"].unsqueeze(-1)}),
        ("kda.beta", lambda a: a | {"beta": a["beta"].long()}),
        ("kda.initial_state", lambda a: a | {"initial_state": a["initial_state"][:1]}),
        ("kda.cu_seqlens", lambda a: a | {"cu_seqlens": a["cu_seqlens"] - 1}),
        ("kda.cu_seqlens", lambda a: a | {"cu_seqlens": a["cu_seqlens"] // 2}),
        ("kda.cu_seqlens", lambda a: a | {"cu_seqlens": a["cu_seqlens"][[1, 0, 2]]}),
        ("kda.cu_seqlens", lambda a: a | {"cu_seqlens": a["cu_seqlens"].float()}),
        ("kda.cu_seqlens", lambda a: {n: x.repeat(2, *[1] * (x.ndim - 1)) for n, x in a.items()}),
    ],
)
def test_wrong_arguments_are_named(op, argument, spoil):
    tensors, cu = inputs([5, 4], 5.0, torch.float32)
    arguments = dict(zip(NAMES, tensors, strict=True), cu_seqlens=cu)
    with pytest.raises(OperatorError, match="TT111") as caught:
        op(**spoil(arguments), scale=SCALE)
    assert caught.value.where == argument


@pytest.mark.parametrize("op", FAST)
def test_shapes_are_known_without_values_and_states_kept_only_for_training(op):
    tensors, cu = inputs([300, 40], 5.0, torch.float32)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x).requires_grad_() for x in tensors]
        out, final = op(*fake[:5], SCALE, fake[5], True, mode.from_tensor(cu))
        out.sum().backward()
        assert out.shape == tensors[2].shape and final.shape == tensors[5].shape
        assert all(x.grad.shape == x.shape for x in fake)
    fwd = chunk._KERNEL if op is kda_chunk else native._KERNEL
    flat = [x.flatten(0, 1) for x in tensors[:5]]
    for save in (False, True):
        states = fwd(*flat, SCALE, tensors[5], cu.long(), save, None)[2]
        rows = (chunk if op is kda_chunk else native)._SEGMENTS.rows(340, 2)
        assert states.shape == (rows if save else 0, *tensors[5].shape[1:])


@pytest.mark.parametrize("op", FAST)
def test_flops_are_counted(op):
    tensors, cu = inputs([64], 5.0, torch.float32)
    with FlopCounterMode(display=False) as counter:
        run(op, tensors, cu)
    assert counter.get_total_flops() == sum(kda_flops(64, HEADS, KEY, VALUE))


@needs_native
def test_workspace_is_what_the_kernel_takes(monkeypatch):
    tensors, cu = inputs([700], 5.0, torch.float32, 40, 24)
    taken = []
    plain = torch.Tensor.new_empty

    def watch(x: Tensor, *shape, **kwargs) -> Tensor:
        taken.append(plain(x, *shape, **kwargs))
        return taken[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", watch)
    run(kda_native, tensors, cu)
    case = OpCase("cpu", torch.float32, {"B": 1, "T": 700, "H": HEADS, "K": 40, "V": 24})
    buffers = [x.numel() for x in taken if x.ndim == 1]
    states = [x.numel() for x in taken if x.ndim == 4 and x.shape[0] > 1]
    assert native.workspace_bytes(case) == 4 * (max(buffers) + sum(states))
