"""Times and memory of a model's three stages on a GPU (Nova): encode, prefill, decode."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoscale.capacity.profile import StageSize, load_profile
from autoscale.capacity.stages import plan_stages
from conserve.engine_scheduling import DecodeShare, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCosts:
    """Times that a model's stages take on a GPU.

    Attributes:
        encode_s, prefill_s, decode_s: of one pass with all SMs; decode for one request.
        per_decode_s: that each further request of a batch adds to a step.
        sizes: a profile's times of stages beside each other, by the SMs of decodes.
        beside: passes take this many times as long as ``sizes`` says.
        shared_pass, shared_step: the speed of an encode or a prefill, and of a step beside it, on
            SMs that nothing divides; 1 is the speed alone.
    """

    encode_s: float
    prefill_s: float
    decode_s: float
    per_decode_s: float
    prompt_tokens: int
    sizes: Mapping[int, StageSize]
    beside: float
    shared_pass: float
    shared_step: float

    def pass_s(self, stage: Stage, decode_sms: int | None = 0) -> float:
        """Return the time of an encode or a prefill while decodes have SMs of their own.

        0: nothing decodes. None: nothing divides the SMs, and steps run beside it.
        """
        if not decode_sms:
            alone_s = self.encode_s if stage == "encode" else self.prefill_s
            return alone_s / self.shared_pass if decode_sms is None else alone_s
        size = self.sizes[decode_sms]
        return self.beside * (size.encode_s if stage == "encode" else size.prefill_s)

    def step_s(self, batch: int, beside: Stage | None = None, sms: int | None = None) -> float:
        """Return the time of a step that decodes; alone, or on these SMs beside a stage."""
        alone_s = self.decode_s + self.per_decode_s * (batch - 1)
        if beside is None:
            return alone_s
        if sms is None:
            return alone_s / self.shared_step
        size = self.sizes[sms]
        one_s = size.decode_beside_encode_s if beside == "encode" else size.decode_beside_prefill_s
        return alone_s * self.beside * one_s / self.decode_s

    def hybrid_s(self, decodes: int, chunk_tokens: int, hidden: float) -> float:
        """Return the time of a step that decodes and computes a chunk of a prompt.

        Of the chunk's compute and the reading of the weights the longer one hides the shorter one:
        all of it with a ``hidden`` of 1, as in `costs.Steps`, and none with 0.
        """
        reads_s = self.step_s(max(1, decodes))
        computes_s = self.prefill_s * chunk_tokens / self.prompt_tokens
        return reads_s + computes_s - hidden * min(reads_s, computes_s)


# CogAgent-9B on an RTX A6000, as far as Nova's paper says it. The profile names its assumptions:
# encode and prefill take time in inverse proportion to their SMs, and decodes have a knee at S*.
_CURVES = load_profile("a6000-cogagent").stages
assert _CURVES is not None
_SIZES = {size.decode_sms: size for size in _CURVES.sizes}
# S*, S_min and d are those of section V-A.
NOVA_SHARES: Mapping[Stage, DecodeShare] = plan_stages(_CURVES).shares
A6000_COGAGENT = VisionCosts(
    # Table I.
    encode_s=0.8068,
    prefill_s=0.3241,
    decode_s=0.0289,
    # Section III-C: 30.6 ms with a batch of 10.
    per_decode_s=(0.0306 - 0.0289) / 9,
    # 70 MB of KV a request (V-A), at 40,960 bytes a token.
    prompt_tokens=1_709,
    sizes=_SIZES,
    # Beside each other passes share the memory's bandwidth and the L2 cache (III-B). Fitted to
    # table V: at 0.8/s, where nearly all passes have 72 SMs, encode and prefill take 1.35 s. All
    # stages are assumed to lose alike.
    beside=1.35 / (_SIZES[12].encode_s + _SIZES[12].prefill_s),
    # Table IV: two kernels on two streams end after 680.6 and 1,241.8 ms, alone after 588.3 and
    # 699.8 ms. From 680.6 ms on the second one is alone; before, it has done the rest of its work.
    # Assumed for all kernels, and for prefills as for encodes.
    shared_pass=588.3 / 680.6,
    shared_step=(699.8 - (1241.8 - 680.6)) / 680.6,
)


def static_shares(beside_encode: int, beside_prefill: int) -> Mapping[Stage, DecodeShare]:
    """Return shares that no number of pending requests moves."""
    return {
        "encode": DecodeShare(beside_encode, beside_encode, 0),
        "prefill": DecodeShare(beside_prefill, beside_prefill, 0),
    }


def queueing_s(rate_per_s: float, mean_s: float, mean_square_s2: float) -> float:
    """Return the mean wait in a queue with such service times (Nova, equation 6: M/G/1).

    It is infinite if requests come faster than they are served.
    """
    idle = 1 - rate_per_s * mean_s
    return rate_per_s * mean_square_s2 / (2 * idle) if idle > 0 else math.inf


@dataclass(frozen=True, slots=True)
class TowerLayers:
    """A vision encoder's weights: of each of its layers, and all others."""

    layers: int
    layer_bytes: int
    other_bytes: int

    def kept_bytes(self, kept: int) -> int:
        """Return what stays on the GPU with this many layers there at a time (section III-E)."""
        return self.other_bytes + min(kept, self.layers) * self.layer_bytes


# CogAgent-9B's, with 2 bytes a parameter, as vLLM's `glm4v.py` builds it. A layer is 1,792 wide,
# and 15,360 between its two matrices. The others: a patch's 588 values, 6,401 positions and a
# class; a convolution of 2 by 2, a projection, and three matrices of 4,096 by 13,696; vectors.
COGAGENT_TOWER = TowerLayers(
    layers=63,
    layer_bytes=2 * (4 * 1792**2 + 2 * 1792 * 15360 + 9 * 1792 + 15360),
    other_bytes=2
    * ((588 + 6401 + 2) * 1792 + 4 * 1792 * 4096 + 4096**2 + 3 * 4096 * 13696 + 5 * 4096),
)
