"""Several ranks: so far what they are measured by."""
