"""The stream that the lane's kernels run on, where there is a GPU."""

from typing import Any

from deployments.engine.sm_slots.pairs import slot_pairs


def plain_stream(device: Any) -> Any:
    """A ``torch.cuda.Stream`` whose kernels share all SMs with the decodes'; None on a CPU."""
    if device.type == "cpu":
        return None
    import torch

    return torch.cuda.Stream(device)


def lane_stream(plain: Any) -> Any:
    """The stream of the lane's side of the engine's SMs, as the border is now; or the plain one.

    The border moves between steps, within a step's turn: ask within a chunk's.
    """
    return slot_pairs().bound.lane_stream or plain
