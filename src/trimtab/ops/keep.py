"""Results that selective recomputation keeps instead of computing again.

A recomputed layer runs twice. Of a few operators the result is small beside what it costs: those
are kept from the first pass, and the second gets them back while autograd records the operator as
ever. The numbers are the same, since the tensors are.

Knows: which operators these are. Does not know: layers, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

from torch import Tensor

R = TypeVar("R")

# By the name within torch.ops.trimtab. Routed experts cost three products per expert of a token,
# attention grows with the square of the length; either keeps about one hidden state per token.
KEPT_OPERATORS = frozenset({
    "experts_fwd", "attention_tiles_fwd", "attention_gather_fwd", "attention_triton_fwd",
})


class KeptResults:
    """The results of one layer's first pass, in order."""

    def __init__(self) -> None:
        self._results: list[object] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the operators give inside the block."""
        with _active(lambda run: self._keep(run())):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Give the operators what was kept; any number of times, each from the beginning."""
        results = iter(self._results)
        with _active(lambda _: _aliases(next(results)), replays=True):
            yield

    def _keep(self, result: R) -> R:
        # An alias: the result itself gets a graph, which must not live as long as this.
        self._results.append(_aliases(result))
        return result


def keeping(function: Callable[..., R]) -> Callable[..., R]:
    """The same function, whose results can be kept; they must not be changed in place."""

    def run(*args: object) -> R:
        through = _through.get()
        return function(*args) if through is None else cast(R, through(lambda: function(*args)))

    return run


def keeps_results() -> bool:
    """Whether results are kept, or given back, now: a layer is short of memory then."""
    return _through.get() is not None


def replays() -> bool:
    """Whether results that were kept are given back now."""
    return _replays.get()


_through: ContextVar[Callable[..., object] | None] = ContextVar("through", default=None)
_replays: ContextVar[bool] = ContextVar("replays", default=False)


@contextmanager
def _active(through: Callable[..., object], *, replays: bool = False) -> Iterator[None]:
    tokens = _through.set(through), _replays.set(replays)
    try:
        yield
    finally:
        _through.reset(tokens[0])
        _replays.reset(tokens[1])


def _aliases(result: object) -> object:
    """A tensor, or the tensors of a tuple, without their graph."""
    if isinstance(result, Tensor):
        return result.detach()
    assert isinstance(result, tuple), "operators give a tensor or a tuple of tensors"
    return tuple(each.detach() for each in result)
