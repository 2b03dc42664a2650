"""Runs inside vLLM's scheduler and workers, beyond what a turn needs; see README.md."""
