"""How many of a GPU's SMs decodes have to themselves, in slots of a tenth."""

from conserve.engine_scheduling import DecodeReserve

SLOTS = 10
# What is read from memory comes as fast from this share of the SMs as from all of them: assumed;
# AgentServe's figure 3 (an image) has decodes saturate early, and prefills nearly linear.
_SATURATES_AT = 0.4


def bandwidth_of(share: float) -> float:
    """Return the share of the memory's bandwidth that a share of the SMs gets."""
    return min(1.0, share / _SATURATES_AT)


class FixedShare:
    """A split that nothing moves."""

    def __init__(self, share: float = 0.5) -> None:
        self._share = share

    def decide(self, waited_s: float, now_s: float) -> float:
        return self._share

    def step(self, lasted_s: float, share: float, now_s: float) -> None: ...


class FedBackShare:
    """R of AgentServe's algorithm 1, as `DecodeReserve` has it."""

    def __init__(self, late_s: float) -> None:
        self._reserve = DecodeReserve(range(1, SLOTS + 1), late_s=late_s)

    def decide(self, waited_s: float, now_s: float) -> float:
        """Return the share of SMs that decodes have beside a prefill that has waited."""
        return self._reserve.decide(decodes=True, waited_s=waited_s, now_s=now_s) / SLOTS

    def step(self, lasted_s: float, share: float, now_s: float) -> None:
        self._reserve.step(lasted_s, round(share * SLOTS), now_s)
