"""Whether an adapter belongs to a base: fingerprints compared.

Knows: the fingerprint an adapter's manifest has, that of a checkpoint in any layout. Does not know:
tensors, models.
"""

from __future__ import annotations

from trimtab.checkpoint.adapter import AdapterFile
from trimtab.checkpoint.source import Source
from trimtab.errors import AdapterError


def require_base(
    adapter: AdapterFile, source: Source, where: str, *, accept: str | None = None
) -> None:
    """Refuse a base that is not the one an adapter was trained on.

    The fingerprint (`Source.fingerprint`) depends neither on the layout of the files nor on what
    contains them; a base quantised otherwise has another one. An adapter that names none passes.

    Args:
        adapter: a read adapter.
        source: the base.
        where: the adapter's directory, for the message.
        accept: fingerprint of a base that may be used all the same, in full.

    Raises:
        AdapterError: TT505 with both fingerprints.
    """
    wanted = None if adapter.manifest is None else adapter.manifest.source_fingerprint
    if wanted is None:
        return
    found = source.fingerprint()
    if found in (wanted, accept):
        return
    raise AdapterError(
        "TT505", where, f"was trained on the base {wanted}; {source.where} is {found}",
        hint=f"name the base it was trained on, or accept this one with --accept-base {found}",
    )
