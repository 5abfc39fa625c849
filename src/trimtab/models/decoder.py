"""The decoder: embedding, a loop over layers, final norm, output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.arch.quantization import PackedForm
from trimtab.arch.spec import ArchSpec, AxialVisionSpec, DenseSpec, KDASpec, VisionSpec
from trimtab.errors import DataError
from trimtab.models.axial_vision import AxialVisionTower, Merger
from trimtab.models.cache import KDACache, MLACache, ModelCache
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.kda import KDA
from trimtab.models.linear import Linear, RMSNorm, Weight
from trimtab.models.mla import MLA, Selected
from trimtab.models.moe import GatedFFN, MoE
from trimtab.models.residual import StreamState, add_output, add_sites, start, starts_block
from trimtab.models.vision import Projector, VisionTower, check_images
from trimtab.ops.backends import OpTable
from trimtab.ops.keep import KeptResults
from trimtab.ops.precision import linear


class StorageTypes:
    """Storage dtypes of a build: of ordinary tensors, of float32 islands, and packed or not.

    Args:
        main: dtype of tensors stored in the model's own dtype.
        island: dtype of tensors stored as F32.
        packed: the form that a parameter of routed experts stays packed in, by name; one that is
            not named is decoded.
    """

    def __init__(
        self, main: torch.dtype, island: torch.dtype, packed: Mapping[str, PackedForm]
    ) -> None:
        self.main, self.island, self.packed = main, island, packed


class DecoderLayer(nn.Module):
    """One layer: mixer and feed-forward, each between a read and a write of the stream."""

    def __init__(self, arch: ArchSpec, index: int, types: StorageTypes, ops: OpTable) -> None:
        super().__init__()
        spec, d = arch.layers[index], arch.hidden_size
        self.index = index
        self.starts_block = starts_block(arch, index)
        add_sites(self, arch, types.main, types.island)
        self.input_layernorm = RMSNorm(d, arch.norm_eps, types.main)
        self.self_attn: KDA | MLA
        if isinstance(spec.mixer, KDASpec):
            self.self_attn = KDA(spec.mixer, d, index, types.main, types.island, ops)
        else:
            self.self_attn = MLA(spec.mixer, d, index, types.main, ops)
        self.post_attention_layernorm = RMSNorm(d, arch.norm_eps, types.main)
        self.mlp: GatedFFN | MoE
        if isinstance(spec.ffn, DenseSpec):
            self.mlp = GatedFFN(
                d, spec.ffn.intermediate_size, spec.ffn.activation, types.main, ops
            )
        else:
            at = f"layers.{index}.mlp.experts"
            forms = types.packed.get(f"{at}.gate_up"), types.packed.get(f"{at}.down")
            self.mlp = MoE(spec.ffn, d, index, types.main, types.island, ops, forms)

    def forward(
        self, state: StreamState, selected: Selected | None, ctx: ForwardContext
    ) -> tuple[StreamState, Selected | None]:
        """One layer's effect on the residual stream, and on the selection of sparse attention.

        Args:
            state: the residual stream.
            selected: what the last layer with an indexer selected, see `MLA.forward`.
            ctx: the pack.
        """
        x, state = state.read(self, "attention")
        x = self.input_layernorm(x)
        if isinstance(self.self_attn, MLA):
            mixed, selected = self.self_attn(x, selected, ctx)
        else:
            mixed = self.self_attn(x, ctx)
        state = state.write(mixed)
        y, state = state.read(self, "ffn")
        return state.write(self.mlp(self.post_attention_layernorm(y), ctx)), selected


class CausalLM(nn.Module):
    """A whole model over flat packs of tokens, some of which stand for images.

    Args:
        arch: what to build.
        types: storage dtypes.
        compute_dtype: dtype of activations.
        ops: operators.
        vision: build tower and projector where the architecture has them.
    """

    def __init__(
        self, arch: ArchSpec, types: StorageTypes, compute_dtype: torch.dtype, ops: OpTable,
        *, vision: bool = True,
    ) -> None:
        super().__init__()
        self.arch, self.compute_dtype, self.ops = arch, compute_dtype, ops
        d = arch.hidden_size
        self.vision: VisionTower | AxialVisionTower | None = None
        self.projector: Projector | Merger | None = None
        if isinstance(arch.vision, VisionSpec) and vision:
            self.vision = VisionTower(arch.vision, types.main)
            self.projector = Projector(arch.vision, d, types.main)
        elif isinstance(arch.vision, AxialVisionSpec) and vision:
            self.vision = AxialVisionTower(arch.vision, types.main)
            self.projector = Merger(arch.vision, types.main)
        self.embed = Weight((arch.vocab_size, d), types.main)
        self.layers = nn.ModuleList(
            DecoderLayer(arch, index, types, ops) for index in range(arch.num_layers)
        )
        add_output(self, arch, types.main)
        self.norm = RMSNorm(d, arch.norm_eps, types.main)
        self.lm_head = None
        if not arch.tie_word_embeddings:
            self.lm_head = Linear(d, arch.vocab_size, types.main)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states that the output head reads.

        Args:
            input_ids: [T] int64, flat tokens of the N sequences of `ctx`.
            ctx: sequence lengths, images, cache, tape, sinks.

        Returns:
            [T, D] in the compute dtype.

        Raises:
            DataError: TT407 if images and placeholder tokens do not fit.
        """
        x = self.embed.weight[input_ids].to(self.compute_dtype)
        if ctx.images is not None:
            features = self.image_features(input_ids, ctx.images, ctx)
            x = x.index_copy(0, ctx.images.rows, features)
        _observe(ctx, "embed", x)
        state, selected = start(self.arch, x, self.ops), None
        for index, layer in enumerate(self.layers):
            if ctx.recompute != "none" and torch.is_grad_enabled():
                state, selected = checkpoint(
                    layer, state, selected, ctx, use_reentrant=False,
                    context_fn=partial(_passes, ctx), preserve_rng_state=False,
                )
            else:
                state, selected = layer(state, selected, ctx)
            _observe(ctx, str(index), state.hidden)
        hidden: Tensor = self.norm(state.finish(self))
        _observe(ctx, "final", hidden)
        if ctx.cache is not None:
            new = torch.tensor(ctx.lengths, device=ctx.cache.lengths.device)
            ctx.cache.lengths = ctx.cache.lengths + new
        return hidden

    def image_features(
        self, input_ids: Tensor, images: ImageBatch, ctx: ForwardContext
    ) -> Tensor:
        """The rows that replace the embeddings of the placeholder tokens, [M, D].

        Args:
            input_ids: [T] int64, the pack that the images belong to.
            images: M placeholder rows and what fills them.
            ctx: of the pack.

        Raises:
            DataError: TT407 if the model has no tower, or the images do not fit the tokens.
        """
        if self.vision is None or self.projector is None:
            raise DataError("TT407", self.arch.name, "was built without a vision tower")
        check_images(images, self.arch, input_ids, continues=ctx.cache is not None)
        at_rows = ctx.at(images.rows)
        x = self.vision(images.patches.to(self.compute_dtype), images.grids, at_rows)
        features: Tensor = self.projector(x, at_rows)
        return features

    @property
    def head_weight(self) -> Tensor:
        """[W, D] of the output head, which may be the embedding table."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, W]."""
        return linear(hidden, self.head_weight)

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """-log p of each label in nats, [R] in at least float32, without all logits at once.

        Args:
            hidden: [R, D], what `forward` gives.
            labels: [R] int64; 0 is given where a label is -100.
        """
        return self.ops.cross_entropy(hidden, self.head_weight, labels, 0.0)

    def new_cache(self, num_sequences: int) -> ModelCache:
        """Empty caches for decoding N sequences."""
        layers: list[KDACache | MLACache] = [
            KDACache() if isinstance(spec.mixer, KDASpec) else MLACache()
            for spec in self.arch.layers
        ]
        device = self.embed.weight.device
        return ModelCache(layers, torch.zeros(num_sequences, dtype=torch.int64, device=device))


def _observe(ctx: ForwardContext, name: str, value: Tensor) -> None:
    if ctx.observe is not None:
        ctx.observe(name, value)


class _Pass:
    """Contexts that are entered anew each time: a graph that is kept is recomputed more than once."""

    def __init__(self, *contexts: Callable[[], AbstractContextManager[None]]) -> None:
        self._contexts = contexts
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for context in self._contexts:
            self._entered.enter_context(context())

    def __exit__(self, *reason: Any) -> None:
        self._entered.__exit__(*reason)


def _passes(ctx: ForwardContext) -> tuple[_Pass, _Pass]:
    """The first pass of a layer, and its recomputation, which replays choices and kept results."""
    replays = () if ctx.tape is None else (ctx.tape.replaying,)
    if ctx.recompute == "layer":
        return _Pass(), _Pass(*replays)
    kept = KeptResults()
    return _Pass(kept.recording), _Pass(*replays, kept.replaying)
