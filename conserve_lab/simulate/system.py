"""Describes what is simulated: a system's engines, and by which rules turns get to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from conserve.placement import PolicyName
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.rivals import RivalName

History = Literal["kept", "moved", "recomputed"]


class SimulationError(ValueError):
    """This cannot be simulated; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class System:
    """A system to simulate.

    Attributes:
        placement, queue_limit, queue_timeout_s, pausing: as in `conserve.settings.Settings`.
        wrong_decision_rate: the number of ``per_turn``.
        history: how a prefiller that prefills a later turn gets the turn's history. ``kept``: from
            its own cache, the rest from the decoder, as in the live system; ``moved``: from the
            decoder each time; ``recomputed``: it computes the whole prompt again.
        transfers_block: whether the engine that takes KV over waits for it within a step, as with a
            connector that loads synchronously.
        direct_s, handed_off_s: what a turn takes before it gets to its first engine, as in
            `autoscale.capacity.profile.Overhead`.
        handoff_chunk_tokens: only whole chunks are handed off.
        stale_s: how often engines say what they do, where the placement asks for that; above 0.
        noise: the standard deviation of the logarithm by which what they say of a step is off; the
            same seed draws the same noise.
        host_tokens: room for KV in host memory; 0: only what is being handed off is there.
        keeps_ended: whether engines keep ended conversations' KV until they need its room, as vLLM
            does.
        rival: another system's rules for the decoders, instead of `placement`.
        weights: tenants' shares of service; 1 for those that are not among them.
        ttl_s: for how long ``ttl`` keeps idle KV.
        interval_s: how often ``thunderagent`` resumes and pauses; above 0.
        decay: when ``thunderagent`` resumes, acting programs' tokens count decay^-t; 1: in full.
    """

    name: str
    placement: PolicyName
    prefillers: tuple[Costs, ...]
    decoders: tuple[Costs, ...]
    wrong_decision_rate: float = 0.0
    history: History = "kept"
    transfers_block: bool = False
    direct_s: float = 0.0
    handed_off_s: float = 0.0
    handoff_chunk_tokens: int = 256
    max_sequences: int = 256
    block_tokens: int = 16
    queue_limit: int = 1024
    queue_timeout_s: float = 300.0
    pausing: bool = False
    stale_s: float = 1.0
    noise: float = 0.1
    host_tokens: int = 0
    keeps_ended: bool = False
    rival: RivalName | None = None
    weights: Mapping[str, int] = field(default_factory=dict)
    ttl_s: float = 2.0
    interval_s: float = 5.0
    decay: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("stale_s", self.stale_s), ("interval_s", self.interval_s)):
            if not value > 0:
                raise SimulationError(f"{name} is {value:g}; give a number above 0")
        if not self.decay >= 1:
            raise SimulationError(f"decay is {self.decay:g}; give at least 1")
