"""Operators in one pass: pairs of custom ops that keep inputs and small statistics, not intermediates.

Each has its readable form one package up (`ops/cross_entropy.py`, `ops/residual.py`, ...).
"""
