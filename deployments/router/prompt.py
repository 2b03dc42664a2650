"""Counts a turn's prompt in tokens, by the model's own chat template and tokenizer."""

import asyncio
import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from conserve.apis import CHAT, COMPLETIONS
from conserve.errors import ApiError
from conserve.histories.kinship import LEAST_SYSTEM_TOKENS
from conserve.recognition import Digest
from conserve.recognition.apis import messages_of, tools_of
from deployments.router.request import ClientRequest
from deployments.router.upstream import EngineUnreachable, Upstream

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
_LEADING = ("system", "developer")
# Some templates refuse a chat without a message of the user's. Neither begins as the other does.
_DIFFERENT = ("a", "7")


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
    digests leave out `volatile` text.
    """

    def __init__(self, upstream: Upstream, volatile: Collection[str] = ()) -> None:
        self._upstream = upstream
        self._exact = "times" not in volatile
        self._lengths: OrderedDict[Digest, int] = OrderedDict()

    async def length(self, request: ClientRequest, counted: CountedPrompt, url: str) -> int:
        """Return a turn's system part's length in tokens; 0: it has none, or is not counted."""
        system = None if request.chain is None else request.chain.system
        if (
            system is None
            or counted.prompt_tokens < LEAST_SYSTEM_TOKENS
            or request.size > _MOST_BYTES
        ):
            return 0
        body = request.body
        if not self._exact or any(body.get(name) for name in _WRITE_IT_OTHERWISE):
            return 0
        if body.get("tool_choice") in _NO_TOOLS:
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
        leading = [*takewhile(_is_leading, given[:-1])]
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


def _is_leading(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in _LEADING


def _common_length(one: list[int], other: list[int]) -> int:
    return bisect_left(
        range(1, min(len(one), len(other)) + 1), True, key=lambda n: one[:n] != other[:n]
    )
