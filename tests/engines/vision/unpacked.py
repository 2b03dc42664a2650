"""A worker that leaves a model's weights in its layers, on CPUs too, and says how many there are.

On a CPU vLLM packs those of linear layers into memory of its kernels, where nothing can be copied.
"""

from typing import Any

import vllm._custom_ops as ops
from vllm.model_executor.layers import utils

from conserve_inside.tower.offload import layers_of_tower

ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False


class UnpackedWorker:
    """vLLM loads this module for it, where the model runs."""

    get_model: Any

    def conserve_memory(self) -> dict[str, int]:
        """Return the bytes of all layers of the tower, of where they are, and on GPUs of KV."""
        _, layers = layers_of_tower(self.get_model())
        weights = [one for layer in layers for one in layer.state_dict().values()]
        places = {one.data_ptr(): one.nbytes for one in weights}
        return {
            "tower_bytes": sum(one.nbytes for one in weights),
            "physical_bytes": sum(places.values()),
            "kv_bytes": int(getattr(self, "available_kv_cache_memory_bytes", 0)),
        }
