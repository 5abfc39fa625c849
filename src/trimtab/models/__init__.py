"""Single-device modules wired from an ArchSpec.

Knows: torch modules, operators, caches, LoRA. Must not know: torch.distributed, transformers,
files.
"""
