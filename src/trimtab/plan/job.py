"""What is to be run: method, precision, batch, adapters, and the habits of the program that runs it.

Knows: choices and their names. Does not know: what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab.arch.adapter import match_word
from trimtab.arch.outline import Outline
from trimtab.arch.params import ParamSpec

Method = Literal["lora", "full", "frozen"]
BaseDtype = Literal["native", "bf16", "fp32"]
ExpertAdapters = Literal["none", "per_expert", "shared_outer"]
Dispatcher = Literal["flat", "all_gather", "dedup"]
Kernels = Literal["fused", "plain"]
Precision = Literal["bf16", "fp8", "fp4"]

DEFAULT_TARGETS = ("attention",)


@dataclass(frozen=True, slots=True)
class Recompute:
    """What the backward pass computes again.

    Args:
        layers: whole layers: all of them, none, or the first so many of each stage.
        selective: parts of the others: `core_attn`, `layernorm`, `moe_act`, `mla_up_proj`, `mlp`,
            `mlp_act`, `moe`. `other_products` keeps attention and every other matrix product of a
            dense layer, the policy known as selective by operator.
    """

    layers: Literal["all", "none"] | int = "all"
    selective: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Stack:
    """Habits of a training program that memory and time depend on.

    Args:
        name: of the program.
        shards: `optimizer` keeps whole parameters and gradients on every data-parallel rank and
            divides moments and masters; `all` divides everything and gathers layer by layer;
            `none` keeps everything whole on every rank.
        weight_bytes: of a trained parameter as the forward pass reads it.
        grad_bytes: of its gradient.
        master_bytes: of its master copy, 0 where the parameter is its own.
        moment_bytes: of both Adam moments.
        keeps_norm_output: a fused norm and projection keep input and output of the norm.
        weight_grad_buffer: gradients are added into the main buffer by the GEMM, and autograd is
            given one uninitialised tensor per weight shape, which stays allocated.
        loss_in_place: training in full, the loss turns the logits into their gradient.
        logit_bytes: of one logit at the peak of another loss, all copies together.
        whole_in_pipeline: with a pipeline, divided parameters stay gathered for the step, gradients are
            reduced after the last micro-batch, and the last stage keeps the output of each.
        expandable_segments: the allocator grows its blocks, so that sizes in turns leave no holes.
        workspace: of the GEMM library, in bytes.
        sequence_parallel: what lies between the products of a layer is divided by tp, too.
        overlaps_data: gradient and parameter collectives of data parallelism run beside compute.
    """

    name: str
    shards: Literal["optimizer", "all", "none"]
    weight_bytes: float = 2
    grad_bytes: float = 4
    master_bytes: float = 4
    moment_bytes: float = 8
    keeps_norm_output: bool = True
    weight_grad_buffer: bool = False
    loss_in_place: bool = False
    logit_bytes: float = 6
    whole_in_pipeline: bool = False
    expandable_segments: bool = False
    workspace: int = 64 * 2**20
    sequence_parallel: bool = True
    overlaps_data: bool = True


TRIMTAB = Stack("trimtab", shards="all", weight_bytes=4, grad_bytes=4, master_bytes=0,
                keeps_norm_output=True, logit_bytes=0)
MEGATRON = Stack("megatron", shards="optimizer", weight_grad_buffer=True, loss_in_place=True)
FULL_TRAINING = MEGATRON
# Plain cross-entropy: logits in bf16 and fp32, log-probabilities, and their gradient in fp32.
PLAIN_LOGIT_BYTES = 14
FSDP = Stack("fsdp", shards="all", weight_bytes=4, grad_bytes=4, master_bytes=0,
             logit_bytes=PLAIN_LOGIT_BYTES, whole_in_pipeline=True, expandable_segments=True)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Which matrices get a LoRA pair.

    Args:
        rank: r.
        experts: form of the adapters on routed experts.
        names: adapted parameters.
        leaves: `owner/leaf` of each, such as `mla/o_proj`.
    """

    rank: int
    experts: ExpertAdapters
    names: frozenset[str]
    leaves: frozenset[str]


def choose_adapters(
    outline: Outline, rank: int, words: Sequence[str], experts: ExpertAdapters
) -> Adapters:
    """Select the targets of LoRA as a recipe would.

    Raises:
        AdapterError: a word selects nothing or what must not be trained.
    """
    found: list[ParamSpec] = []
    for word in words:
        found += match_word(outline.params, word, "finetune.lora.target_modules")
    if experts != "none":
        routed = (p for p in outline.params if p.owner == "routed_expert")
        found += [p for p in routed if not p.name.endswith("_bias")]
    names = frozenset(param.name for param in found)
    return Adapters(rank, experts, names, frozenset(leaf_of(param) for param in found))


def leaf_of(param: ParamSpec) -> str:
    """`owner/leaf` of a parameter, the same in every layer."""
    name = param.name.removesuffix(".weight")
    return f"{param.owner}/{name.rsplit('.', 1)[-1]}"


@dataclass(frozen=True, slots=True)
class Job:
    """A training job apart from its layout.

    Args:
        method: `lora` trains adapters, `full` everything, `frozen` runs forward only.
        base_dtype: how frozen weights are kept.
        seq_len: tokens of one sequence.
        micro_batch: sequences of one forward pass of one rank group.
        global_batch: sequences between two optimizer steps.
        adapters: of `lora`.
        recompute: in the backward pass.
        stack: the program.
        optimizer: `adam`, or `muon` with one fp32 moment on matrices.
        routing: most tokens of an expert-parallel rank over the mean.
        capacity_factor: most tokens per expert over the mean; None drops none.
        precision: of matrix products, where the device has it.
        mtp: multi-token prediction layers are trained too.
        kernels: `plain` where linear attention runs without fused kernels.
        attention: `plain` where softmax attention keeps its probabilities.
        dropout: of attention and of what the layers add to the stream.
        offload_optimizer: share of the moments in host memory, with a copy of their masters there.
        chunks: model chunks per rank of an interleaved pipeline.
        chunk_group: micro-batches that a chunk works off before the next one does, 0 for as many
            as there are stages.
        graphs: the host cost of operators is removed by graph capture.
    """

    method: Method = "lora"
    base_dtype: BaseDtype = "native"
    seq_len: int = 8192
    micro_batch: int = 1
    global_batch: int = 64
    adapters: Adapters | None = None
    recompute: Recompute = field(default_factory=Recompute)
    stack: Stack = TRIMTAB
    optimizer: Literal["adam", "muon"] = "adam"
    routing: float = 1.15
    capacity_factor: float | None = None
    precision: Precision = "bf16"
    mtp: bool = False
    kernels: Kernels = "fused"
    attention: Kernels = "fused"
    dropout: bool = False
    offload_optimizer: float = 0.0
    chunks: int = 1
    chunk_group: int = 0
    graphs: bool = False

    def adapted(self, leaf: str) -> bool:
        """Whether matrices of this `owner/leaf` are trained, in full or by an adapter."""
        if self.method == "full":
            return True
        return self.adapters is not None and leaf in self.adapters.leaves

    @property
    def trains_adapters(self) -> bool:
        """LoRA with at least one target."""
        return self.method == "lora" and self.adapters is not None
