"""Training: loss, optimizer groups, schedule, one step, the loop, exact state, metrics.

Knows: recipes, models, data and checkpoints, and how they meet. Does not know: serving, scoring.
"""
