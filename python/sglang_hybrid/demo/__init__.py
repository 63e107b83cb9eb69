"""The embedded hybrid model and the quickstart conversation."""
