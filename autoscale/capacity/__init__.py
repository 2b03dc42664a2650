"""Capacity: what an engine can do (`profile`), as applications use it (`served`, `stages`)."""
