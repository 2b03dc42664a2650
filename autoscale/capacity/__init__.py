"""Capacity: what an engine can do (`profile`, `fit`) and how many of them are needed (`plan`)."""
