"""Which matrices of a release are quantised, and into which tensors.

Knows: the owners that are never quantised and how a config lists further modules. Does not know:
any family's names, how values are decoded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from trimtab.arch.params import Owner, ParamSpec
from trimtab.arch.quantization import Quantization, StoredPart
from trimtab.errors import ArchError

# Gives the tensors of a matrix from its parameter and released module name; empty if it is plain.
PartsOf = Callable[[ParamSpec, str], tuple[StoredPart, ...]]

_NEVER: frozenset[Owner] = frozenset(
    {"embedding", "head", "kda", "norm", "residual", "router", "vision", "projector"}
)


def plain(param: ParamSpec, module: str) -> tuple[StoredPart, ...]:
    """The `PartsOf` of a release without quantisation."""
    del param, module
    return ()


def parts_of(quantization: Quantization | None, always_kept: Sequence[str]) -> PartsOf:
    """The `PartsOf` of a release.

    Args:
        quantization: its declared form.
        always_kept: patterns of modules that the family never quantises.

    Raises:
        ArchError: the `PartsOf` raises TT202 where a group of INT4 does not divide a row.
    """
    if quantization is None:
        return plain
    kept = [re.compile(_pattern(text)) for text in (*always_kept, *quantization.keeps)]
    parts = quantization.parts

    def of(param: ParamSpec, module: str) -> tuple[StoredPart, ...]:
        if not _is_matrix(param) or any(pattern.match(module) for pattern in kept):
            return ()
        if quantization.name == "INT4" and param.shape[-1] % parts[1].per_column:
            rule = f"must divide the {param.shape[-1]} columns of {module}"
            where = "quantization_config: group_size"
            raise ArchError("TT202", where, rule, value=parts[1].per_column)
        return parts

    return of


def _is_matrix(param: ParamSpec) -> bool:
    if param.form != "plain" or param.owner in _NEVER:
        return False
    return param.owner == "routed_expert" or (
        param.name.endswith(".weight") and len(param.shape) == 2
    )


def _pattern(text: str) -> str:
    """A regular expression that matches the released name of a kept module from its start."""
    if text.startswith("re:"):
        return text.removeprefix("re:")
    return rf"(?:{fnmatch.translate(text)}|{re.escape(text)}\.)"
