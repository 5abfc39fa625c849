"""Native convolution and gated norm of a KDA layer against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.compare import relative_error
from trimtab.errors import OperatorError
from trimtab.ops.backends import build_ops
from trimtab.ops.kda import mixer
from trimtab.ops.kda.mixer import conv_silu_native, gated_norm_native
from trimtab.ops.kda.operators import conv_silu_reference
from trimtab.ops.native.library import SWITCH, unavailable
from trimtab.ops.norm import gated_rms_norm
from trimtab.ops.registry import OpCase
from trimtab.verify.tolerances import limit

HEADS, HEAD = 3, 16
REASON = unavailable("mixer")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator)


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def results(run, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def compare(native, reference, tensors: list[Tensor]) -> None:
    expected = results(reference, [x.double() for x in tensors])
    for found, want in zip(results(native, tensors), expected, strict=True):
        assert relative_error(found, want) <= limit("kda.output.float32")


@pytest.mark.parametrize("lengths", [[1], [2, 1, 1], [100, 3, 65], [4, 3, 2, 1]], ids=str)
@pytest.mark.parametrize(("taps", "normed"), [(4, True), (4, False), (1, True), (8, False)])
def test_convolution_equals_its_reference(lengths, taps, normed):
    where = positions(lengths)
    tensors = [draw(len(where), HEADS * HEAD, scale=3.0), draw(HEADS * HEAD, 1, taps, seed=1)]
    compare(
        lambda x, w: conv_silu_native(x, w, where, HEAD, normed),
        lambda x, w: conv_silu_reference(x, w, where, HEAD, normed), tensors,
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_gated_norm_equals_its_reference(scale):
    tensors = [
        draw(17, HEADS, HEAD, scale=scale), draw(17, HEADS, HEAD, seed=1, scale=scale),
        draw(HEAD, seed=2),
    ]
    compare(
        lambda x, g, w: gated_norm_native(x, g, w, 1e-5),
        lambda x, g, w: gated_rms_norm(x, g, w, 1e-5), tensors,
    )


def test_documents_of_a_pack_do_not_leak_through_the_convolution():
    where, weight = positions([5, 6, 4]), draw(HEAD, 1, 4, seed=1)
    x = draw(15, HEAD)
    before = results(lambda y: conv_silu_native(y, weight, where, HEAD, True), [x])
    x[5:11] = float("nan")
    after = results(lambda y: conv_silu_native(y, weight, where, HEAD, True), [x])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:5], b[:5]) and torch.equal(a[11:], b[11:])


def test_threads_do_not_change_a_bit_and_fresh_buffers_are_not_read(monkeypatch):
    where = positions([40, 25])
    conv = [draw(65, HEADS * HEAD), draw(HEADS * HEAD, 1, 4, seed=1)]
    norm = [draw(65, HEADS, HEAD), draw(65, HEADS, HEAD, seed=1), draw(HEAD, seed=2)]

    def both() -> list[Tensor]:
        return [
            *results(lambda x, w: conv_silu_native(x, w, where, HEAD, True), conv),
            *results(lambda x, g, w: gated_norm_native(x, g, w, 1e-5), norm),
        ]

    before, threads = both(), torch.get_num_threads()
    plain = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: plain(x).fill_(float("nan")))
    try:
        torch.set_num_threads(3)
        after = both()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_the_kernels_cannot_run_has_a_reason(monkeypatch):
    shapes = {"T": 4, "H": 1, "K": 64, "taps": 4}
    assert mixer.supports(OpCase("cpu", torch.float32, shapes)) is None
    for case, word in (
        (OpCase("cuda", torch.float32, shapes), "cuda"),
        (OpCase("cpu", torch.bfloat16, shapes), "bfloat16"),
        (OpCase("cpu", torch.float32, shapes | {"K": 12}), "multiple of 8"),
        (OpCase("cpu", torch.float32, shapes | {"K": 520}), "520"),
        (OpCase("cpu", torch.float32, shapes | {"taps": 9}), "taps"),
    ):
        assert word in str(mixer.supports(case))
    monkeypatch.setenv(SWITCH, "0")
    assert SWITCH in str(mixer.supports(OpCase("cpu", torch.float32, shapes)))
    x, weight = draw(4, 64), draw(64, 1, 4)
    op = build_ops().conv_silu
    assert torch.equal(
        op(x, weight, positions([4]), 64, True),
        conv_silu_reference(x, weight, positions([4]), 64, True),
    )


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("conv_silu.x", lambda ops: ops.conv_silu(draw(4), draw(16, 1, 4), positions([4]), 16, True)),
        ("conv_silu.weight", lambda ops: ops.conv_silu(draw(4, 16), draw(16, 4), positions([4]), 16, True)),
        ("conv_silu.positions", lambda ops: ops.conv_silu(draw(4, 16), draw(16, 1, 4), positions([3]), 16, True)),
        ("conv_silu.head", lambda ops: ops.conv_silu(draw(4, 16), draw(16, 1, 4), positions([4]), 12, True)),
        ("gated_norm.gate", lambda ops: ops.gated_norm(draw(4, 2, 8), draw(4, 1, 8), draw(8), 1e-5)),
        ("gated_norm.weight", lambda ops: ops.gated_norm(draw(4, 2, 8), draw(4, 2, 8), draw(9), 1e-5)),
    ],
)
def test_wrong_arguments_are_named(argument, call):
    with pytest.raises(OperatorError, match="TT111") as caught:
        call(build_ops())
    assert caught.value.where == argument


def test_shapes_are_known_without_values():
    with FakeTensorMode() as mode:
        x = mode.from_tensor(draw(5, HEADS * HEAD)).requires_grad_()
        weight = mode.from_tensor(draw(HEADS * HEAD, 1, 4))
        out = conv_silu_native(x, weight, mode.from_tensor(positions([5])), HEAD, True)
        heads = out.unflatten(-1, (HEADS, HEAD))
        gated_norm_native(heads, heads, mode.from_tensor(draw(HEAD)), 1e-5).sum().backward()
        assert out.shape == x.shape and x.grad.shape == x.shape
