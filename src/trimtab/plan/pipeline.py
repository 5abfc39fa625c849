"""Seconds of one optimizer step of a pipeline whose stages differ.

Knows: the 1F1B order. Does not know: what a stage computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of time in which a stage works.

    Args:
        stage: which.
        batch: micro-batch.
        is_forward: else backward.
        start, end: seconds from the start of the step.
    """

    stage: int
    batch: int
    is_forward: bool
    start: float
    end: float


def order(stage: int, stages: int, batches: int) -> list[tuple[bool, int]]:
    """Forward and backward passes of a stage under 1F1B, as (is_forward, micro-batch).

    >>> order(1, 2, 2)
    [(True, 0), (False, 0), (True, 1), (False, 1)]
    """
    warm = min(batches, stages - stage - 1)
    passes = [(True, b) for b in range(warm)]
    for b in range(batches - warm):
        passes += [(True, warm + b), (False, b)]
    return passes + [(False, b) for b in range(batches - warm, batches)]


def simulate(
    forward: Sequence[float], backward: Sequence[float], send: Sequence[float], batches: int
) -> tuple[float, list[Slot]]:
    """Run 1F1B.

    A stage works as soon as its input is there and it is free.

    Args:
        forward: seconds of a micro-batch on each stage.
        backward: the same of the backward pass.
        send: seconds from each stage to the next.
        batches: micro-batches.

    Returns:
        Seconds until the last pass ends, and every pass.
    """
    count = len(forward)
    queues = [order(i, count, batches) for i in range(count)]
    position, free = [0] * count, [0.0] * count
    done: dict[tuple[int, bool, int], float] = {}
    slots: list[Slot] = []
    left = 2 * count * batches
    while left:
        for i in range(count):
            while position[i] < len(queues[i]):
                is_forward, batch = queues[i][position[i]]
                ready = _ready(done, i, count, is_forward, batch, send)
                if ready is None:
                    break
                start = max(free[i], ready)
                end = start + (forward[i] if is_forward else backward[i])
                done[(i, is_forward, batch)] = free[i] = end
                slots.append(Slot(i, batch, is_forward, start, end))
                position[i] += 1
                left -= 1
    return max(free), slots


def _ready(
    done: dict[tuple[int, bool, int], float], stage: int, count: int, is_forward: bool, batch: int,
    send: Sequence[float],
) -> float | None:
    """When the input of a pass is there, None while the pass it comes from has not run."""
    if is_forward and stage == 0:
        return 0.0
    if not is_forward and stage == count - 1:
        return done.get((stage, True, batch))
    source, hop = (stage - 1, stage - 1) if is_forward else (stage + 1, stage)
    found = done.get((source, is_forward, batch))
    return None if found is None else found + send[hop]


def estimate(
    forward: Sequence[float], backward: Sequence[float], send: Sequence[float], batches: int,
    chunks: int = 1,
) -> float:
    """Seconds of 1F1B without simulating it, also interleaved.

    The slowest stage works through all micro-batches; before and after, one micro-batch passes
    the other stages, in `chunks` parts of which only one is waited for.

    Args:
        forward: seconds of a micro-batch on each stage.
        backward: the same of the backward pass.
        send: seconds from each stage to the next.
        batches: micro-batches.
        chunks: model chunks per rank.
    """
    each = [f + b for f, b in zip(forward, backward, strict=True)]
    slowest = max(each)
    others = sum(each) - slowest
    return batches * slowest + others / chunks + 2 * sum(send)
