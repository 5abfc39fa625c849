"""Operators beside what a user would run instead: `python -m benchmarks.ops [NAME ...]`.

Each module has `run() -> list[Result]`: correctness first, then times in turns and memory.
"""
