"""The whole job on a tiny model: inspect, verify, fine-tune, evaluate, merge, export, report.

Knows: the order of the verbs, the demo's base, data and recipe. Does not know: how any verb does
its work; it calls the functions that the command line calls.
"""
