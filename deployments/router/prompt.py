"""Counts a turn's prompt, by the model's own template and tokenizer, and has its images encoded."""

import asyncio
import json
import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from conserve.apis import CHAT, COMPLETIONS
from conserve.encoders import Encoder, Encoders, node_of
from conserve.errors import ApiError
from conserve.histories.kinship import LEAST_SYSTEM_TOKENS
from conserve.recognition import Digest
from conserve.recognition.apis import messages_of, tools_of
from conserve.recognition.normal import is_system
from conserve.turn import TurnStats
from deployments.router.request import ClientRequest
from deployments.router.upstream import EngineUnreachable, Upstream

logger = logging.getLogger("ray.serve")

# How many system parts' lengths are kept, the newest.
_MOST_LENGTHS = 4096
# Longer requests have it not counted: to count a prompt twice would slow others.
_MOST_BYTES = 256 * 1024
# With these a template may write tools and system messages otherwise, or not at all.
_WRITE_IT_OTHERWISE = (
    "chat_template_kwargs",
    "documents",
    "reasoning",
    "reasoning_effort",
    "thinking",
)
# With these a completion's prompt is not what its token ids are.
_ALTER_IDS = ("prompt_embeds", "truncate_prompt_tokens")
_NO_TOOLS = ("none", {"type": "none"})
# Some templates refuse a chat without a message of the user's. Neither begins as the other does.
_DIFFERENT = ("a", "7")
# After that the engine that computes the prompt encodes by itself, as it does without encoders.
LONGEST_ENCODING_S = 10.0


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A prompt as a prefiller gets it.

    Attributes:
        prompt: token ids; for a completion with several prompts, a list of such lists.
        prompt_tokens: length of all of it.
        longest_tokens: length of its longest part.
        multimodal: whether its token ids are not all of it.
        encode_tokens: embeddings of its images that the counting engine's node has not encoded.
    """

    prompt: Any
    prompt_tokens: int
    longest_tokens: int
    multimodal: bool = False
    encode_tokens: int = 0

    def followed_by(self, token_ids: list[int]) -> "CountedPrompt":
        """Return the prompt with what was generated after it, where that can be put behind it."""
        prompt = self.prompt
        if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
            prompt = [*prompt, *token_ids]
        more = len(token_ids)
        return replace(
            self,
            prompt=prompt,
            prompt_tokens=self.prompt_tokens + more,
            longest_tokens=self.longest_tokens + more,
        )


def counted_as_sent(request: ClientRequest) -> CountedPrompt | None:
    """Count a prompt that is one list of token ids; return None for any other.

    No engine is asked, so nothing else of the request is judged by this.
    """
    body = request.body
    if request.path != COMPLETIONS or any(body.get(name) is not None for name in _ALTER_IDS):
        return None
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
        return None
    return CountedPrompt(prompt, len(prompt), len(prompt)) if prompt else None


async def count_prompt(request: ClientRequest, upstream: Upstream, url: str) -> CountedPrompt:
    """Have an engine check a turn, and count its prompt."""
    checked = await upstream.check(url, request.engine_path, request.raw)
    prompts = checked.prompts
    lengths = [len(prompt) for prompt in prompts]
    whole = prompts[0] if len(prompts) == 1 else prompts
    return CountedPrompt(
        whole, sum(lengths), max(lengths), checked.multimodal, checked.encode_tokens
    )


class SystemLengths:
    """Keeps the lengths of system parts, which are tools and leading system messages.

    An engine counts each once: the tokens that the turn's prompt and two others with that part have
    in common. A part that may be written otherwise, though its digest is the same, is not counted:
    digests leave out text that changes each time.
    """

    def __init__(self, upstream: Upstream, volatile: Collection[str] = ()) -> None:
        self._upstream = upstream
        self._exact = "times" not in volatile
        self._lengths: OrderedDict[Digest, int] = OrderedDict()

    async def length(self, request: ClientRequest, counted: CountedPrompt, url: str) -> int:
        """Return a turn's system part's length in tokens; 0: it has none, or is not counted."""
        system = None if request.chain is None else request.chain.system
        fits = counted.prompt_tokens >= LEAST_SYSTEM_TOKENS and request.size <= _MOST_BYTES
        if system is None or not fits or not self._exact:
            return 0
        body = request.body
        otherwise = any(body.get(name) for name in _WRITE_IT_OTHERWISE)
        if otherwise or body.get("tool_choice") in _NO_TOOLS:
            return 0
        known = self._lengths.get(system)
        if known is None:
            try:
                known = await self._counted(request, counted.prompt, url)
            except EngineUnreachable:
                return 0
            except ApiError:
                # Only the account needs it; the turn itself finds out what is wrong.
                known = 0
            self._lengths[system] = known
            if len(self._lengths) > _MOST_LENGTHS:
                self._lengths.popitem(last=False)
        self._lengths.move_to_end(system)
        return known

    async def _counted(self, request: ClientRequest, prompt: list[int], url: str) -> int:
        # vLLM makes a chat of any API's turn.
        given = messages_of(request.path, request.body)
        chat: dict[str, Any] = {"model": request.model}
        if "chat_template" in request.body:
            chat["chat_template"] = request.body["chat_template"]
        if tools := tools_of(request.path, request.body):
            chat["tools"] = tools
        leading = [*takewhile(is_system, given[:-1])]
        bodies = (
            chat | {"messages": [*leading, {"role": "user", "content": text}]}
            for text in _DIFFERENT
        )
        raws = (json.dumps(body).encode("utf-8", "surrogatepass") for body in bodies)
        checks = await asyncio.gather(*(self._upstream.check(url, CHAT, raw) for raw in raws))
        length = len(prompt)
        for check in checks:
            (begun,) = check.prompts
            length, prompt = _common_length(prompt[:length], begun), begun
        return length


def _common_length(one: list[int], other: list[int]) -> int:
    return bisect_left(
        range(1, min(len(one), len(other)) + 1), True, key=lambda n: one[:n] != other[:n]
    )


@dataclass(eq=False)
class Encoding:
    """Has encoders encode what a turn brings, before its prompt is computed on their node.

    Each new medium goes to an encoder of its own, all of a turn's at a time.
    """

    upstream: Upstream
    encoders: Encoders

    async def encode(
        self, request: ClientRequest, url: str, stats: TurnStats
    ) -> list[tuple[Encoder, EngineUnreachable]]:
        """Return once media are in the memory of the node of the engine at ``url``, or will not be.

        It raises nothing, and empties `ClientRequest.to_encode`. What encoders did is added to the
        turn's ``stats``. Returns those whose connection broke.
        """
        node = node_of(url)
        jobs = [self._one(node, request.path, stats, *one) for one in request.to_encode.items()]
        # The turn may last for long, and images are large.
        request.to_encode.clear()
        done = await asyncio.gather(*jobs)
        return [broken for broken in done if broken is not None]

    async def _one(
        self, node: str, path: str, stats: TurnStats, name: str, raw: bytes
    ) -> tuple[Encoder, EngineUnreachable] | None:
        encoder = self.encoders.begin(node, name, time.monotonic())
        if encoder is None:
            return None
        try:
            async with asyncio.timeout(LONGEST_ENCODING_S):
                done = await self.upstream.prefill(encoder.url, path, raw)
        except asyncio.CancelledError:
            self.encoders.give_up(encoder, name)
            raise
        except (EngineUnreachable, ApiError, TimeoutError) as error:
            why = str(error) or f"not encoded after {LONGEST_ENCODING_S:g} s"
            logger.warning("encoding on %s: %s", encoder.id, why)
            if not isinstance(error, ApiError) or error.status >= 500:
                self.encoders.failed(encoder, time.monotonic())
            self.encoders.end(encoder, name)
            return (encoder, error) if isinstance(error, EngineUnreachable) else None
        self.encoders.end(encoder, name)
        stats.add_encoded(done)
        return None
