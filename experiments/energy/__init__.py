"""Tokens per joule of homogeneous and heterogeneous tiers: ``make bench-energy``.

What is modelled: how long the work takes and what it draws (`model`). What is measured: that caps
are set, hold and are put back, and how many joules are accounted to whom, by the very code that a
node's actor runs, through nvidia-ml-py, on stand-in GPUs (`rig`).
"""
