"""Trimtab: from the released weights of a sparse-MoE hybrid model to a tuned, checked, served one.

Importing this package never imports torch; each verb loads what it needs.
"""

__version__ = "0.1.0"
