"""A turn's prompt in tokens, by the model's own chat template and tokenizer."""

from dataclasses import dataclass
from typing import Any

from deployments.router.request import ClientRequest
from deployments.router.upstream import Upstream


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A prompt as a prefiller gets it.

    Attributes:
        prompt: token ids; for a completion with several prompts, a list of such lists.
        tokens: length of all of it.
        longest_tokens: length of its longest part.
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
    """Have an engine check a turn, and count its prompt.

    Args:
        url: the engine's URL.

    Raises:
        ApiError: the engine would refuse the turn.
        EngineUnreachable: try another engine.
    """
    prompts = await upstream.check(url, request.path, request.raw)
    lengths = [len(prompt) for prompt in prompts]
    whole = prompts[0] if len(prompts) == 1 else prompts
    return CountedPrompt(whole, sum(lengths), max(lengths))
