"""An engine on leased SMs (``tiers.NAME.sm_slots``).

`lease` leases them from the node's actor, `worker` runs vLLM's worker on them, and `pairs` moves
the border between decoding's SMs and prefill's. `means` knows how streams keep to SMs, of
which `green_contexts` is one way.
"""
