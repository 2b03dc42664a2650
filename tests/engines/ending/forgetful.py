"""Makes vLLM's prefix cache find nothing, as a fault in its blocks' hashes would.

On a CPU an engine's core runs its worker, and loads this module for it.
"""

from vllm.v1.core.block_pool import BlockPool


class ForgetfulWorker:
    BlockPool.get_cached_block = lambda *_, **__: None
