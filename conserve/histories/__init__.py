"""Knows what histories have in common: points where others may leave them, KV counted once."""
