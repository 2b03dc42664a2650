"""Measurements of ConServe. Each module runs by itself: ``python -m benchmarks.<name>``."""
