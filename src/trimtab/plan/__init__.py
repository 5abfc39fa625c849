"""What a job will need before the cluster is rented: memory, time, communication, layouts.

Knows: models as outlines, clusters as documents. Does not know: torch; it starts at once.
"""
