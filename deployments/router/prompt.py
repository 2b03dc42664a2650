"""How long a turn's prompt is, by the model's own chat template and tokenizer."""

from dataclasses import dataclass
from typing import Any

from conserve.errors import ApiError
from deployments.router.request import ClientRequest
from deployments.router.upstream import Upstream

# Prompts of one completion: each is counted by a call of its own.
_MOST_PROMPTS = 128


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A prompt as a prefiller gets it.

    Attributes:
        prompt: token ids where possible, else what the client sent.
        tokens: length of all of it.
        longest_tokens: length of its longest part; a completion may have several prompts.
    """

    prompt: Any
    tokens: int
    longest_tokens: int

    def followed_by(self, token_ids: list[int]) -> "CountedPrompt":
        """The same with what was generated after it, where that can be put behind it."""
        prompt = self.prompt
        if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
            prompt = [*prompt, *token_ids]
        more = len(token_ids)
        return CountedPrompt(prompt, self.tokens + more, self.longest_tokens + more)


async def count_prompt(request: ClientRequest, upstream: Upstream, url: str) -> CountedPrompt:
    """Have an engine count a turn's prompt.

    Args:
        url: the engine's URL.

    Raises:
        ApiError: the engine refuses the prompt, or it is no prompt.
        EngineUnreachable: try another engine.
    """
    if request.chat:
        return _whole(await upstream.count_tokens(url, request.tokenizer_body()))
    prompt, model = request.body["prompt"], {"model": request.model}
    if isinstance(prompt, str):
        return _whole(await upstream.count_tokens(url, {**model, "prompt": prompt}))
    if not isinstance(prompt, list):
        raise ApiError(400, "prompt must be a string or a list", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return _whole(prompt)
    if len(prompt) > _MOST_PROMPTS:
        raise ApiError(
            400,
            f"a completion may have {_MOST_PROMPTS} prompts, and this one has {len(prompt)}; send "
            "several",
            param="prompt",
        )
    lengths = []
    for item in prompt:
        if isinstance(item, str):
            lengths.append(len(await upstream.count_tokens(url, {**model, "prompt": item})))
        elif isinstance(item, list):
            lengths.append(len(item))
        else:
            raise ApiError(400, "prompt must hold strings or token ids", param="prompt")
    return CountedPrompt(prompt, sum(lengths), max(lengths))


def _whole(tokens: list[int]) -> CountedPrompt:
    return CountedPrompt(tokens, len(tokens), len(tokens))
