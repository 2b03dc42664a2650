"""Prepares a worker that has most layers of its vision tower in host memory."""

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from conserve_inside.addon import TOWER_LAYERS
from conserve_inside.tower.loading import load_with_tower_on_host
from conserve_inside.tower.offload import require_plain_layers
from deployments.engine.vision.connector import NodeEncoderCache
from deployments.upstream.seams import require_seams


class OffloadedTowerCache(NodeEncoderCache):
    """Connects an engine to its node's images, as every engine that sees has it."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        if role == ECConnectorRole.WORKER:
            # vLLM makes its connector before it loads the model.
            prepare_worker(vllm_config)


def prepare_worker(vllm_config: VllmConfig) -> None:
    """Make this process load its model with most layers of the tower in host memory."""
    require_seams("tower_loading")
    require_plain_layers(vllm_config.compilation_config)
    kept = vllm_config.ec_transfer_config.get_from_extra_config(TOWER_LAYERS, None)
    load_with_tower_on_host(vllm_config, int(kept))
