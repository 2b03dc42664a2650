"""Relations between histories: points where others may leave them, and KV counted once."""
