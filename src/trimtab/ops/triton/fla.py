"""KDA by the kernels of fla-core, where that is installed beside a CUDA device."""

from __future__ import annotations

from torch import Tensor

from trimtab.ops.kda.check import check_kda


def kda_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, gate_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule by `fla.ops.kda.chunk_kda`; arguments and results as `kda_chunk`.

    Raises:
        OperatorError: TT111, an argument is wrong.
    """
    # Late: the package is optional, and importing it looks for a GPU driver.
    from fla.ops.kda import chunk_kda

    del gate_bound
    check_kda(q, k, v, g, beta, initial_state, cu_seqlens)
    out, final = chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(q.device),
    )
    return out, final
