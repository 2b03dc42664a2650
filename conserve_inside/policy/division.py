"""Plans the SMs that decodes have beside encodes and prefills (Nova, section III-C).

Both sides are chosen by enumeration over a profile's `StageCurves`: S_v SMs for decodes beside an
encode, S_p beside a prefill.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, product

from autoscale.capacity.profile import StageCurves, StageSize
from conserve_inside.policy import DecodeShare, Stage

# The paper's bound for a step of decodes (section V-A).
TBT_BOUND_S = 0.08
# Of all requests in encode and prefill; with that many, decodes have S_min (section V-A).
_LEAST_FROM_PENDING = 4


@dataclass(frozen=True, slots=True)
class Division:
    """One choice of S_v and S_p, for a stream of requests that never wait (Nova, figure 5)."""

    encode_sms: int
    prefill_sms: int
    latency_s: float  # A request's (L, equation 1).
    throughput_per_s: float  # Requests (equation 4).
    tbt_s: float  # The longest step of decodes.


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The divisions of a GPU's SMs, and the shares that equation 5 takes from the best one."""

    divisions: tuple[Division, ...]
    # Within the bound, and beaten by no other one in both latency and throughput; quickest first.
    front: tuple[Division, ...]
    least_sms: int  # The fewest SMs with which decodes stay within the bound (S_min).
    within_bound: bool  # False if no size does; `least_sms` is then the largest.
    shares: dict[Stage, DecodeShare]
    by_pending: tuple[Division, ...]  # For 1, 2, ... requests, until decodes have S_min.

    @property
    def best(self) -> Division:
        """The division of least latency (S_v* and S_p*, equation 3)."""
        return self.by_pending[0]


def plan_stages(curves: StageCurves, tbt_bound_s: float = TBT_BOUND_S) -> StagePlan:
    """Return the division of the SMs for each number of pending requests.

    Sizes below S_min are left out of equation 3, so S* is never below it.
    """
    divisions = {
        (beside_encode.decode_sms, beside_prefill.decode_sms): divide(
            beside_encode, beside_prefill, curves.output_tokens
        )
        for beside_encode, beside_prefill in product(curves.sizes, repeat=2)
    }
    fits = [size.decode_sms for size in curves.sizes if _step_s(size) <= tbt_bound_s]
    least_sms = fits[0] if fits else curves.sizes[-1].decode_sms
    allowed = [one for sides, one in divisions.items() if min(sides) >= least_sms]
    best = min(allowed, key=lambda one: (one.latency_s, -one.throughput_per_s))
    sizes = [size.decode_sms for size in curves.sizes]
    encode = _share(best.encode_sms, least_sms, sizes)
    prefill = _share(best.prefill_sms, least_sms, sizes)
    by_pending = [
        divisions[_size(encode, pending, sizes), _size(prefill, pending, sizes)]
        for pending in range(1, _LEAST_FROM_PENDING + 1)
    ]
    return StagePlan(
        divisions=tuple(divisions.values()),
        front=tuple(pareto_front(allowed)),
        least_sms=least_sms,
        within_bound=bool(fits),
        shares={"encode": encode, "prefill": prefill},
        by_pending=tuple(by_pending),
    )


def divide(beside_encode: StageSize, beside_prefill: StageSize, output_tokens: float) -> Division:
    """Return how a request fares if decodes have these sizes (Nova, equations 1, 2 and 4)."""
    encode_s, prefill_s = beside_encode.encode_s, beside_prefill.prefill_s
    front_s = encode_s + prefill_s
    decode_s = (
        encode_s * beside_encode.decode_beside_encode_s
        + prefill_s * beside_prefill.decode_beside_prefill_s
    ) / front_s
    return Division(
        encode_sms=beside_encode.decode_sms,
        prefill_sms=beside_prefill.decode_sms,
        latency_s=front_s + output_tokens * decode_s,
        throughput_per_s=1 / front_s,
        tbt_s=max(beside_encode.decode_beside_encode_s, beside_prefill.decode_beside_prefill_s),
    )


def pareto_front(divisions: Iterable[Division]) -> list[Division]:
    """Return those that no other one beats in both latency and throughput, the quickest first."""
    front: list[Division] = []
    for one in sorted(divisions, key=lambda one: (one.latency_s, -one.throughput_per_s)):
        if not front or one.throughput_per_s > front[-1].throughput_per_s:
            front.append(one)
    return front


def _step_s(size: StageSize) -> float:
    return max(size.decode_beside_encode_s, size.decode_beside_prefill_s)


def _share(most_sms: int, least_sms: int, sizes: list[int]) -> DecodeShare:
    """Return equation 5's terms: S_min with four pending, in steps that the sizes have."""
    unit_sms = math.gcd(*(larger - smaller for smaller, larger in pairwise(sizes)))
    steps = (_LEAST_FROM_PENDING - 1) * unit_sms
    return DecodeShare(most_sms, least_sms, -(-(most_sms - least_sms) // steps) * unit_sms)


def _size(share: DecodeShare, pending: int, sizes: list[int]) -> int:
    """Return the smallest size that has the share, as engines do; sizes may be unevenly spaced."""
    return min(size for size in sizes if size >= share.decode_sms(pending))
