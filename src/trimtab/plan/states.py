"""Bytes of the model state on one rank: base, adapters, gradients, moments, masters.

Knows: which parameter is divided over which degrees, summed from the inventory. Does not know:
activations, time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from trimtab.arch.outline import Outline
from trimtab.arch.params import ParamSpec
from trimtab.plan.job import Job
from trimtab.plan.placement import Degrees
from trimtab.plan.stages import Stage

_TP_AXES = frozenset({"heads", "ffn", "vocab"})
_GATHERED = 2  # bytes of a parameter in bf16
_FLOAT_BYTES = {"native": 0, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Block:
    """Sums over the parameters of one layer, or of table, head or tower.

    Args:
        tp: bytes of the base divided by tensor parallelism.
        whole: bytes of the base that every tensor-parallel rank has.
        expert: bytes of the base divided by expert parallelism.
        tp_elements, whole_elements, expert_elements: trained elements of the same three kinds.
        matrix_elements: trained elements, of those, that are matrices of hidden layers.
        frozen_tp: frozen bytes within `tp` (and so on): none where all is trained.
    """

    tp: float = 0
    whole: float = 0
    expert: float = 0
    tp_elements: float = 0
    whole_elements: float = 0
    expert_elements: float = 0
    matrix_share: float = 0

    def __add__(self, other: Block) -> Block:
        # Written out: a model of a trillion parameters has thousands of them to add, in every search.
        return Block(
            self.tp + other.tp, self.whole + other.whole, self.expert + other.expert,
            self.tp_elements + other.tp_elements, self.whole_elements + other.whole_elements,
            self.expert_elements + other.expert_elements, self.matrix_share + other.matrix_share,
        )

    def __sub__(self, other: Block) -> Block:
        return Block(
            self.tp - other.tp, self.whole - other.whole, self.expert - other.expert,
            self.tp_elements - other.tp_elements, self.whole_elements - other.whole_elements,
            self.expert_elements - other.expert_elements, self.matrix_share - other.matrix_share,
        )


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Model state of one rank, in bytes."""

    base: float
    adapters: float
    gradients: float
    moments: float
    masters: float
    gathered: float
    host: float

    @property
    def total(self) -> float:
        """All of it on the device, gathered parameters apart."""
        return self.base + self.adapters + self.gradients + self.moments + self.masters


class States:
    """Sums of a model and a job, for any stage and any degrees.

    Args:
        outline: the model.
        job: what is trained, and how bases are kept.
    """

    def __init__(self, outline: Outline, job: Job) -> None:
        self._job = job
        layers, table = [Block() for _ in outline.layers], Block()
        self.embedding, self.head, self.mtp = Block(), Block(), Block()
        for param in outline.params:
            block = _block(outline, job, param)
            if param.owner == "embedding" and "vocab" in param.axes:
                table += block
            if param.layer is not None:
                layers[param.layer] += block
            elif param.owner in ("embedding", "vision", "projector"):
                self.embedding += block
            else:
                self.head += block
        self._tied = table if outline.tie_word_embeddings else Block()
        self._table = table.tp_elements
        for param in outline.mtp_params if job.mtp else ():
            self.mtp += _block(outline, job, param)
        self.layers = tuple(layers)
        self._different = tuple(dict.fromkeys(layers))
        self._sums = list(accumulate(layers, initial=Block()))
        self._blocks: dict[tuple[int, int, bool], Block] = {}

    def of_stage(self, stage: Stage, pp: int) -> Block:
        """The sums of one stage, table and head included where it has them."""
        key = (stage.first, stage.last, pp > 1)
        if key not in self._blocks:
            self._blocks[key] = self._of_stage(stage, pp)
        return self._blocks[key]

    def _of_stage(self, stage: Stage, pp: int) -> Block:
        block = self._sums[stage.last] - self._sums[stage.first]
        if stage.has_embedding:
            block += self.embedding
        if stage.has_head:
            block += self.head + self.mtp
            # A tied head is a second copy of the table where it stands on another stage.
            if pp > 1:
                block += self._tied
        return block

    def bytes_on_rank(
        self, stage: Stage, degrees: Degrees, *, resident: bool
    ) -> StateBytes:
        """Bytes on a rank of a stage.

        Args:
            stage: the stage.
            degrees: how the job is divided.
            resident: the base is whole on every data-parallel rank, although the program could
                divide it.
        """
        block = self.of_stage(stage, degrees.pp)
        tp, ep = degrees.tp, degrees.ep * degrees.etp
        dense, expert = degrees.dp_shard * degrees.cp, degrees.expert_shard
        stack, job = self._job.stack, self._job
        if stack.shards == "none":
            dense = expert = 1
        whole_state = stack.shards != "all"
        base_dense = 1 if resident or whole_state else dense
        base_expert = 1 if resident or whole_state else expert
        base = (block.tp / tp + block.whole) / base_dense + block.expert / ep / base_expert
        if job.method == "frozen":
            return StateBytes(base, 0, 0, 0, 0, self._gathered(degrees, base_dense, base_expert), 0)
        d = block.tp_elements / tp + block.whole_elements
        e = block.expert_elements / ep
        state = d / dense + e / expert
        here = d + e if whole_state else state
        adapters = here * stack.weight_bytes if job.method == "lora" else 0.0
        moments, masters = state * stack.moment_bytes, state * stack.master_bytes
        if job.optimizer == "muon":
            share = block.matrix_share / max(1.0, _elements(block))
            moments = state * (stack.moment_bytes - 4 * share)
            table = self._table / tp * (stage.has_embedding or stage.has_head)
            if stack.shards == "optimizer" and table > d / dense:
                # Its orthogonal updates need whole matrices, so that parameters are dealt out whole;
                # the fullest rank has a table, with both moments.
                masters = (table + e / expert) * stack.master_bytes
                moments = table * stack.moment_bytes + e / expert * (stack.moment_bytes - 4)
        moved, gradients = job.offload_optimizer, here * stack.grad_bytes
        gathered = self._gathered(degrees, base_dense, base_expert)
        if self.is_whole(degrees):
            gradients += (d + e) * stack.grad_bytes
            gathered = (d + e) * _GATHERED
        return StateBytes(
            base=base, adapters=adapters, gradients=gradients,
            moments=moments * (1 - moved), masters=masters,
            gathered=gathered, host=(moments + masters) * moved,
        )

    def is_whole(self, degrees: Degrees) -> bool:
        """Whether what is divided over data-parallel ranks is whole between the ends of a step."""
        job = self._job
        return job.method == "full" and job.stack.whole_in_pipeline and degrees.pp > 1

    @property
    def gathered_share(self) -> float:
        """Bytes of gathered parameters over those kept: trained ones are gathered as products read them."""
        return min(1.0, _GATHERED / self._job.stack.weight_bytes) if self._job.method == "full" else 1.0

    def _gathered(self, degrees: Degrees, dense: int, expert: int) -> float:
        """Two layers' parameters in full, the one at work and the next, where they are divided."""
        if dense == 1 and expert == 1:
            return 0.0
        largest = max(
            (b.tp / degrees.tp + b.whole) * (dense > 1) + b.expert / (degrees.ep * degrees.etp) * (expert > 1)
            for b in self._different
        )
        return 2 * largest * self.gathered_share


def _elements(block: Block) -> float:
    return block.tp_elements + block.whole_elements + block.expert_elements


def _block(outline: Outline, job: Job, param: ParamSpec) -> Block:
    size = base_bytes(outline, job, param)
    kind = shard_kind(param)
    tp, whole, expert = (size if kind == k else 0.0 for k in ("tp", "whole", "expert"))
    if job.method == "full":
        n = float(param.numel)
        matrix = n if param.layer is not None and len(param.shape) > 1 else 0.0
        return Block(
            tp, whole, expert, n if kind == "tp" else 0.0, n if kind == "whole" else 0.0,
            n if kind == "expert" else 0.0, matrix,
        )
    if job.adapters is None or param.name not in job.adapters.names:
        return Block(tp, whole, expert)
    on_tp, on_all, on_experts = adapter_elements(job, param)
    return Block(tp, whole, expert, on_tp, on_all, on_experts, on_tp + on_all + on_experts)


def base_bytes(outline: Outline, job: Job, param: ParamSpec) -> float:
    """Bytes of one parameter as the job keeps it, undivided."""
    if job.method == "full":
        return param.numel * job.stack.weight_bytes
    if job.base_dtype == "native":
        return outline.stored_bytes[param.name]
    return param.numel * max(_FLOAT_BYTES[job.base_dtype], 4 if param.dtype == "F32" else 0)


def shard_kind(param: ParamSpec) -> str:
    """`expert`, `tp` or `whole`: what divides a parameter beside the data-parallel shards."""
    if param.owner == "routed_expert":
        return "expert"
    if param.owner in ("vision", "projector"):
        return "whole"
    return "tp" if _TP_AXES & set(param.axes) else "whole"


def adapter_elements(job: Job, param: ParamSpec) -> tuple[float, float, float]:
    """Elements of A and B of one matrix: divided by tp, on every rank, divided by ep."""
    assert job.adapters is not None, "asked of adapted parameters only"
    rank = job.adapters.rank
    if param.owner != "routed_expert":
        rows, columns = param.shape
        rows_split, columns_split = (param.axes[i] in _TP_AXES for i in (0, 1))
        on_tp = rank * (rows * rows_split + columns * columns_split)
        return on_tp, rank * (rows + columns) - on_tp, 0.0
    experts = param.shape[0]
    if len(param.shape) == 4:  # gate_up [E, 2, F, D]
        a, b = rank * param.shape[3], rank * param.shape[1] * param.shape[2]
        shared, own = (a, b) if job.adapters.experts == "shared_outer" else (0, a + b)
    else:  # down [E, D, F]
        a, b = rank * param.shape[2], rank * param.shape[1]
        shared, own = (b, a) if job.adapters.experts == "shared_outer" else (0, a + b)
    return 0.0, float(shared), float(experts * own)
