"""Operators in C++ for the CPU, compiled on first use; PyTorch runs where they cannot be.

Knows: how a source of this directory becomes a loaded library. Must not know: what the functions
in it compute. One `.cpp` per kernel family, a plain C ABI, no headers of torch; what several
share stands in `.h` files beside them.
"""
