"""Scores: held-out bits per byte, exact match, base against adapter, and the gate.

Knows: models, data and adapters. Does not know: training, serving.
"""
