"""What a model is: ArchSpec -> ParamSpec -> StoredTensor.

Knows: architectures, inventories, released names, presets. Must not know: torch, files of weights.
"""
