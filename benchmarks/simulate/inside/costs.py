"""Works out what steps take on the papers' GPUs with the papers' models, from data sheets.

As in the profile `h100-qwen3-8b` (whose ``sources`` say more), matrix products reach 45 % of a
GPU's peak compute (30 % in those of many small experts), and reads 75 % of its bandwidth. These
shares are assumed; all else is from NVIDIA's data sheets and the models' configurations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_BANDWIDTH_SHARE = 0.75
_DENSE_SHARE, _EXPERTS_SHARE = 0.45, 0.30
# Of attention, by FlashAttention's papers: 500 of the H100's 989 TFLOP/s.
_ATTENTION_SHARE = 0.5
# Sampling and scheduling, for each sequence; as in the profile.
_PER_SEQUENCE_S = 2e-5
# Of a GPU's memory, and for activations.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; flops are in 16 bits, dense, a second, at peak, and some memory is for activations."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    reserve_bytes: float = 4e9


@dataclass(frozen=True, slots=True)
class Model:
    """A model.

    Attributes:
        expert_bytes: of the weights; 0: a dense model.
        flops_per_token: two for each active parameter, but for embeddings.
        kv_bytes: of a token.
        pair_flops: for each pair of a token and one before it.
    """

    name: str
    weights_bytes: float
    flops_per_token: float
    kv_bytes: int
    pair_flops: float
    expert_bytes: float = 0.0
    experts: int = 1
    active: int = 1


# NVIDIA's data sheets (without sparsity; GeForce and RTX with 32-bit accumulation). MARS's paper
# has 96 and 144 GiB for the first two, AgentServe's 24 and 32 GB for the others.
H100_NVL = Gpu("H100 NVL", 835e12, 3.9e12, 94e9)
H200_NVL = Gpu("H200 NVL", 835e12, 4.8e12, 141e9)
A5000 = Gpu("RTX A5000", 111e12, 768e9, 24e9, 1e9)
RTX_5090 = Gpu("RTX 5090", 209.5e12, 1792e9, 32e9, 1e9)

# Model cards: parameters; configurations: layers, heads, KV heads, head size. 16 bits a number.
# 30.5e9 parameters, 3.3e9 active; 48 layers of 32 heads, 4 of KV, of 128; 128 experts, 8 of a
# token, of 3 x 2048 x 768 parameters.
QWEN3_CODER_30B = Model(
    "Qwen3-Coder-30B-A3B",
    61e9,
    2 * 3.0e9,
    2 * 48 * 4 * 128 * 2,
    2 * 32 * 128 * 48,
    expert_bytes=48 * 128 * 3 * 2048 * 768 * 2,
    experts=128,
    active=8,
)
# 28 or 36 layers (Qwen2.5), 32 (Llama 3); parameters without embeddings.
QWEN25_3B = Model("Qwen2.5-3B", 6.2e9, 2 * 2.77e9, 2 * 36 * 2 * 128 * 2, 2 * 16 * 128 * 36)
QWEN25_7B = Model("Qwen2.5-7B", 15.2e9, 2 * 6.53e9, 2 * 28 * 4 * 128 * 2, 2 * 28 * 128 * 28)
LLAMA3_8B = Model("Llama-3-8B", 16.1e9, 2 * 6.98e9, 2 * 32 * 8 * 128 * 2, 2 * 32 * 128 * 32)


@dataclass(frozen=True, slots=True)
class Steps:
    """Time that a model's steps take on a GPU.

    Matrix products take what reading the weights or computing takes, whichever is longer: so
    decodes hide behind a prefill's compute. Of experts, those are read that any token of the step
    uses, if tokens choose at random. Attention takes the time of its compute (prefills), and of
    reading KV (decodes).
    """

    gpu: Gpu
    model: Model

    @property
    def capacity_tokens(self) -> int:
        room = _MEMORY_SHARE * self.gpu.memory_bytes - self.model.weights_bytes
        return int((room - self.gpu.reserve_bytes) / self.model.kv_bytes)

    @property
    def per_kv_token_s(self) -> float:
        """Seconds that each token of KV that decodes read adds."""
        return self.model.kv_bytes / (_BANDWIDTH_SHARE * self.gpu.bytes_per_s)

    def step_s(
        self,
        decodes: int,
        kv_tokens: int = 0,
        chunks: Sequence[tuple[int, int]] = (),
        compute: float = 1.0,
        bandwidth: float = 1.0,
    ) -> float:
        """Return the time of a step with this many decodes, which read ``kv_tokens`` in all.

        Chunks are of prefills: tokens, and how many are before them. The step has these shares of
        the GPU.
        """
        tokens = decodes + sum(chunk for chunk, _ in chunks)
        if not tokens:
            return 0.0
        model, gpu = self.model, self.gpu
        untouched = (1 - model.active / model.experts) ** tokens if model.expert_bytes else 0.0
        read = model.weights_bytes - untouched * model.expert_bytes
        share = _EXPERTS_SHARE if model.expert_bytes else _DENSE_SHARE
        flops_per_s = gpu.flops * compute
        bytes_per_s = _BANDWIDTH_SHARE * gpu.bytes_per_s * bandwidth
        products_s = max(read / bytes_per_s, tokens * model.flops_per_token / (share * flops_per_s))
        pairs = sum(chunk * (chunk + 2 * past) for chunk, past in chunks)
        attention_s = pairs * model.pair_flops / (_ATTENTION_SHARE * flops_per_s)
        read_s = kv_tokens * model.kv_bytes / bytes_per_s
        return products_s + attention_s + read_s + _PER_SEQUENCE_S * (decodes + len(chunks))
