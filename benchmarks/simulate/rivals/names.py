"""Names the rivals, on the command line and in reports."""

from typing import Literal

RivalName = Literal["vllm", "affinity", "ttl", "attained", "thunderagent"]
"""``vllm``: least loaded, first come first served; ``affinity``: the same, but conversations stay
where they began; ``ttl``: Continuum; ``attained``: Autellix; ``thunderagent``: ThunderAgent."""
