"""Mixture of experts: routing and the experts' matrix products."""
