"""A worker beside which vLLM's prefix cache finds nothing, as with a fault in its blocks' hashes.

On a CPU it runs in the process of the engine's core, where vLLM loads this module for it.
"""

from vllm.v1.core.block_pool import BlockPool


class ForgetfulWorker:
    """Changes nothing of the worker itself."""


BlockPool.get_cached_block = lambda *_, **__: None
