#!/bin/sh
# Check every CUDA kernel against float64, then time it beside the PyTorch form. Needs a CUDA device.
#   sh benchmarks/gpu_ops.sh [--out FILE]
cd "$(dirname "$0")/.." || exit 1
exec python -m benchmarks.gpu_ops --device cuda "$@"
