"""Math: one readable reference per operator and faster paths with the same signature.

Knows: tensors and equations. Must not know: modules, architectures' files, torch.distributed.
"""
