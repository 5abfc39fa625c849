"""Causal softmax attention over packs, dense or over selected keys, and the indexer."""
