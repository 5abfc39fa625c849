"""Readers: one file per family turns its config.json into an ArchSpec.

A reader exports `read(config, source) -> ArchSpec`; `arch.load` dispatches on `model_type`.
"""
