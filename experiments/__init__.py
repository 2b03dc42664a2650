"""Measurements that docs cite: `make experiment NAME=table`. They are no part of the wheel."""
