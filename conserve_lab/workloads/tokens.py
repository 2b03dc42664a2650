"""Token ids of prompts with given lengths and shared prefixes, made on demand.

A token is a hash of its owner (a key), of a block, and of its place in the block; so the same piece
of history is the same tokens whenever it is sent.
"""

import hashlib
from typing import Any

import numpy as np

from conserve_lab.workloads.plan import require

COMPLETIONS = "/v1/completions"

# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def check_vocabulary(vocabulary: range) -> None:
    """Raise WorkloadError unless ``vocabulary`` can be token ids and tell prompts apart."""
    require(
        len(vocabulary) > 1 and vocabulary.step > 0 and vocabulary.start >= 0,
        f"the vocabulary is {vocabulary}; give a rising range of at least two token ids, from 0",
    )


def key(*owner: str | int) -> int:
    digest = hashlib.blake2b(repr(owner).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw(key: int, blocks: Any, offsets: Any, vocabulary: range) -> Any:
    """Return the tokens at ``offsets`` of ``blocks``, arrays of one shape, or one of them an
    integer.
    """
    blocks = np.atleast_1d(np.asarray(blocks, dtype=np.int64)).astype(np.uint64)
    offsets = np.atleast_1d(np.asarray(offsets, dtype=np.int64)).astype(np.uint64)
    mixed = _mix(_mix(blocks * _GOLDEN + np.uint64(key)) + offsets * _GOLDEN)
    index = (mixed % np.uint64(len(vocabulary))).astype(np.int64)
    return vocabulary.start + vocabulary.step * index


def _mix(values: Any) -> Any:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def completion(prompt: Any, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt.tolist(),
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
