"""What the lane's kernels run on, where there is a GPU."""

from typing import Any


def lane_stream(device: Any) -> Any:
    """A ``torch.cuda.Stream`` for the lane; None on a CPU.

    A plain one: its kernels share all SMs with the decodes'. It is asked for once an engine, when
    the engine's model is loaded. Whoever has SMs for the lane alone returns their stream here; the
    lane does not look at what it is given.
    """
    if device.type == "cpu":
        return None
    import torch

    return torch.cuda.Stream(device)
