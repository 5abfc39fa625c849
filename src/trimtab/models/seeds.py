"""Seeds from names, in place of random state."""

from __future__ import annotations

import hashlib


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on `seed` and `name` only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
