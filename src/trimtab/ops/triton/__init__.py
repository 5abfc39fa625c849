"""Kernels for CUDA devices in Triton. Each module here needs the package `triton`: import it late.

`support` alone does not. The kernels compute in float32 whatever the inputs are stored in.
"""
