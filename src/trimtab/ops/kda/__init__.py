"""Kimi Delta Attention: gate, recurrence (the equation), chunked form, single step."""
