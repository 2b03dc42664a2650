"""What histories have in common: points at which others may leave them, and KV counted once."""
