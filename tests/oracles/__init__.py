"""Slow, obviously correct reference models and random checkpoints for the tests.

Nothing here imports `trimtab`: an oracle that shares code with what it judges judges nothing.
The equations come from the fact sheets `kimi-k3.md` and `hybrid-models.md`; each docstring names
the sheet section it follows.
"""
