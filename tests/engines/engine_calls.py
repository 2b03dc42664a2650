"""Engines asked by themselves, past the router, as it asks them."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from conserve.turn import TurnStats
from conserve.wire import PREFILL_PREFIX, transfer_params
from tests.engines.applications import GPU_CHUNK_TOKENS


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt of token ids.

    Attributes:
        found_tokens: of the prompt, in the engine's own cache or in LMCache.
        took_s: from when it was sent.
    """

    text: str
    prompt_tokens: int
    found_tokens: int
    took_s: float


def compute(url: str, prompt: list[int]) -> Completion:
    """Compute and store a prompt, by the request that the router sends to a prefiller."""
    answer, took_s = _posted(url + PREFILL_PREFIX, prompt, max_tokens=1)
    done = msgspec.json.decode(answer.content, type=TurnStats)
    return Completion("", done.prefilled_tokens, done.prefiller_cached_tokens or 0, took_s)


def complete(url: str, prompt: list[int], tokens: int, prefilled: bool = False) -> Completion:
    """Return a greedy answer of ``tokens`` tokens; the KV of a ``prefilled`` prompt is stored."""
    told = transfer_params(prefilled=prefilled)
    answer, took_s = _posted(
        url, prompt, max_tokens=tokens, temperature=0, ignore_eos=True, kv_transfer_params=told
    )
    said = answer.json()
    details = said["usage"].get("prompt_tokens_details") or {}
    found = details.get("cached_tokens") or 0
    return Completion(said["choices"][0]["text"], said["usage"]["prompt_tokens"], found, took_s)


def _posted(url: str, prompt: list[int], **more: Any) -> tuple[httpx.Response, float]:
    body = {"model": "conserve-embedded", "prompt": prompt, **more}
    started_s = time.perf_counter()
    answer = httpx.post(url + "/v1/completions", json=body, timeout=120)
    took_s = time.perf_counter() - started_s
    assert answer.status_code == 200, answer.text
    return answer, took_s


def whole_chunks(prompt: list[int]) -> int:
    """How many of a prompt's tokens LMCache can hand over: its last is always computed."""
    return (len(prompt) - 1) // GPU_CHUNK_TOKENS * GPU_CHUNK_TOKENS
