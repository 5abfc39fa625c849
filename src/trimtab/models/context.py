"""ForwardContext: everything a forward pass needs beside the tokens, as one explicit value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from trimtab.models.cache import ModelCache
from trimtab.models.tape import C, ChoiceTape
from trimtab.ops.attention.packs import PackBorders, pack_borders

Recompute = Literal["none", "layer", "selective"]


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What a LoRA dropout mask depends on beside the module and the token: (seed, step)."""

    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The images of a pack, in the order of their tokens.

    Args:
        patches: [N, 3, P, P], normalised; the patches of an image lie frame by frame, row by row.
            [N, 3, F, P, P] where a patch spans F frames; without F an image stands still.
        grids: frames, rows and columns of patches of each image.
        rows: [M] int64, positions of the placeholder tokens in the flat pack, ascending.
    """

    patches: Tensor
    grids: tuple[tuple[int, int, int], ...]
    rows: Tensor

    @classmethod
    def join(
        cls, patches: Sequence[ArrayLike], grids: Sequence[Sequence[int]], rows: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> ImageBatch | None:
        """A batch from one array of patches and one grid per image; None without images."""
        if not patches:
            return None
        arrays = [torch.as_tensor(image) for image in patches]
        return cls(
            torch.cat(arrays).to(device),
            tuple((int(t), int(h), int(w)) for t, h, w in grids),
            torch.as_tensor(rows, dtype=torch.int64).to(device),
        )


@dataclass(frozen=True, slots=True)
class Routing:
    """What one router made of the T tokens of a pack.

    Args:
        layer: of the router.
        scores: [T, E] after the sigmoid, in at least float32, with their graph.
        bias: [E] that took part in the selection.
        ids: [T, A] selected experts.
        dropped: [E] int64, choices over the capacity; None without one.
        valid: [T] bool, False for padding; None where all tokens are real.
    """

    layer: int
    scores: Tensor
    bias: Tensor
    ids: Tensor
    dropped: Tensor | None
    valid: Tensor | None

    @property
    def tokens_per_expert(self) -> Tensor:
        """[E] int64, real tokens that selected each expert, dropped ones among them."""
        real = self.ids if self.valid is None else self.ids[self.valid]
        return torch.bincount(real.flatten(), minlength=len(self.bias))


@dataclass(frozen=True)
class ForwardContext:
    """A pack of N sequences in T flat tokens.

    Args:
        lengths: tokens per sequence, summing to T.
        device: of the tensors below.
        valid: [T] bool, False for padding; None where all tokens are real.
        token_ids: [T] int64, global number of each token in the data stream, for dropout masks.
        cache: decoding state of the N sequences; the tokens then continue them.
        tape: records or replays discrete choices.
        stats: called by every router with what it did.
        observe: called as observe(name, tensor) with hidden states.
        dropout: set while training; None switches dropout off.
        recompute: `layer` computes layers again in the backward pass instead of keeping what they
            need for it; `selective` does so but for the results named in `ops.keep`.
        images: whose features replace the rows of their placeholder tokens.
        capacity: most tokens of an expert over the mean load; more are dropped. None drops none.
    """

    lengths: tuple[int, ...]
    device: torch.device
    valid: Tensor | None = None
    token_ids: Tensor | None = None
    cache: ModelCache | None = None
    tape: ChoiceTape | None = None
    stats: Callable[[Routing], None] | None = None
    observe: Callable[[str, Tensor], None] | None = None
    dropout: DropoutKey | None = None
    recompute: Recompute = "none"
    images: ImageBatch | None = None
    capacity: float | None = None

    @classmethod
    def packed(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", *,
        valid: Tensor | None = None, token_ids: Tensor | None = None,
        cache: ModelCache | None = None, tape: ChoiceTape | None = None,
        stats: Callable[[Routing], None] | None = None,
        observe: Callable[[str, Tensor], None] | None = None,
        dropout: DropoutKey | None = None, recompute: Recompute = "none",
        images: ImageBatch | None = None, capacity: float | None = None,
    ) -> ForwardContext:
        """A context for sequences of the given lengths; the fields are those of the class."""
        return cls(
            tuple(int(n) for n in lengths), torch.device(device), valid, token_ids, cache, tape,
            stats, observe, dropout, recompute, images, capacity,
        )

    def at(self, rows: Tensor) -> ForwardContext:
        """The context of modules that see these tokens of the pack only, as the projector does.

        Args:
            rows: [M] int64, positions in the pack.
        """
        ids = None if self.token_ids is None else self.token_ids[rows]
        return replace(self, token_ids=ids)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[N+1] int32 borders of the sequences."""
        sizes = torch.tensor((0, *self.lengths), dtype=torch.int32)
        return torch.cumsum(sizes, 0, dtype=torch.int32).to(self.device)

    @cached_property
    def borders(self) -> PackBorders:
        """Sequence starts, for attention."""
        return pack_borders(self.lengths, self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64, index of each token among the new tokens of its sequence."""
        return torch.arange(sum(self.lengths), device=self.device) - self.borders.starts

    @property
    def slots(self) -> Tensor:
        """[T] int64, index of each token in its whole sequence, cached tokens counted."""
        if self.cache is None:
            return self.positions
        return self.cache.lengths[self.sequence_ids] + self.positions

    @property
    def begins(self) -> bool:
        """Whether the sequences begin in this pack, so that it holds all their tokens."""
        return self.cache is None or not bool(self.cache.lengths.any())

    @cached_property
    def sequence_ids(self) -> Tensor:
        """[T] int64, 0..N-1."""
        counts = torch.tensor(self.lengths, device=self.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.device), counts)

    def choose(self, layer: int, kind: str, compute: Callable[[], C]) -> C:
        """A discrete choice, through the tape if there is one."""
        return compute() if self.tape is None else self.tape.choose(layer, kind, compute)
