"""CacheSpec: what each layer keeps while decoding.

Knows: cache entries per token and per sequence. Does not know: torch; `models` allocates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.arch.spec import ArchSpec, KDASpec, MLASpec
from trimtab.arch.stored import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Decoding memory of one layer.

    Args:
        layer: layer index.
        kind: `kda` keeps a state per sequence, `mla` an entry per token.
        latent_dim: values per token of the normed latent and the shared key slice.
        index_dim: values per token of the indexer key, 0 without an indexer of its own; a pooled
            key counts for its share of each of its tokens.
        state_elements: values of the recurrent state, always fp32.
        conv_elements: values of the convolution tail: K-1 inputs of q, k and v.
        tail_elements: keys and gates of the tokens that do not fill a pool yet.
        dtype: of everything but the state.
    """

    layer: int
    kind: Literal["kda", "mla"]
    latent_dim: int = 0
    index_dim: float = 0
    state_elements: int = 0
    conv_elements: int = 0
    tail_elements: int = 0
    dtype: str = "BF16"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that grow with the sequence, indexer keys included."""
        return round((self.latent_dim + self.index_dim) * DTYPE_BYTES[self.dtype])

    @property
    def state_bytes(self) -> int:
        """Bytes per sequence of the fp32 state, without the convolution tail."""
        return self.state_elements * DTYPE_BYTES["F32"]

    @property
    def conv_bytes(self) -> int:
        """Bytes per sequence of the convolution tail."""
        return self.conv_elements * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_sequence(self) -> int:
        """All bytes that do not grow with the sequence."""
        return self.state_bytes + self.conv_bytes + self.tail_elements * DTYPE_BYTES[self.dtype]


def cache_specs(arch: ArchSpec, dtype: str = "BF16") -> tuple[CacheSpec, ...]:
    """One CacheSpec per layer.

    Args:
        arch: the model.
        dtype: of latent, keys and convolution tail; the recurrent state is always fp32.
    """
    return tuple(
        _kda(index, layer.mixer, dtype)
        if isinstance(layer.mixer, KDASpec)
        else _mla(index, layer.mixer, dtype)
        for index, layer in enumerate(arch.layers)
    )


def _kda(index: int, spec: KDASpec, dtype: str) -> CacheSpec:
    return CacheSpec(
        index, "kda",
        state_elements=spec.num_heads * spec.head_dim * spec.head_dim,
        conv_elements=3 * (spec.conv_kernel - 1) * spec.width,
        dtype=dtype,
    )


def _mla(index: int, spec: MLASpec, dtype: str) -> CacheSpec:
    indexer, index_dim, tail = spec.indexer, 0.0, 0
    if indexer is not None and indexer.share == "full":
        pool = indexer.pool or 1
        index_dim, tail = indexer.dim / pool, 2 * indexer.dim * (pool - 1)
    return CacheSpec(
        index, "mla",
        latent_dim=spec.kv_lora_rank + spec.qk_rope_head_dim,
        index_dim=index_dim,
        tail_elements=tail,
        dtype=dtype,
    )
