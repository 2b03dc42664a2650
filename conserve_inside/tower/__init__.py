"""A vision tower's layers in host memory (Nova, section III-E; ``media.tower_layers``).

`connector` prepares the worker, `loading` loads the model, and `offload` copies layers in.
"""
