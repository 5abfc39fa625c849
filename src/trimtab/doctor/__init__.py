"""Diagnosis: from what is seen on this machine or in a run to a cause and a next action."""
