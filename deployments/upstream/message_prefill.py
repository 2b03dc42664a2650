"""Has vLLM's Messages API continue a last message of the assistant's (prefill).

vLLM 0.32 closes it and begins another; Anthropic continues it. Where the model's template or
tokenizer cannot, the request is refused in Anthropic's words.
"""

import functools
from typing import Any

from deployments.upstream.patch import Patch

NO_PREFILL = (
    "This model does not support assistant message prefill. "
    "The conversation must end with a user message."
)
# How much of a prefill is looked for at the end of the prompt.
_LOOKED_AT_CHARS = 32
_LOOKED_AT_TOKENS = 64


def apply() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.exceptions import VLLMValidationError

    convert = AnthropicServingMessages.to_chat_completion_request.__func__
    render = AnthropicServingMessages.render_chat_request

    @functools.wraps(convert)
    def converted(cls: type[Any], request: Any, **options: Any) -> Any:
        chat = convert(cls, request, **options)
        if request.messages[-1].role == "assistant":
            chat.continue_final_message, chat.add_generation_prompt = True, False
        return chat

    @functools.wraps(render)
    async def rendered(self: Any, request: Any) -> Any:
        if not request.continue_final_message:
            return await render(self, request)
        try:
            result = await render(self, request)
        except (ValueError, VLLMValidationError) as error:
            if "continue_final_message" not in str(error):
                raise
            return _no_prefill()
        if isinstance(result, tuple):
            text = _text_of(request.messages[-1].get("content"))
            if not all(_ends_with(text, one, self.renderer) for one in result[1]):
                return _no_prefill()
        return result

    AnthropicServingMessages.to_chat_completion_request = classmethod(converted)  # type: ignore[arg-type]
    AnthropicServingMessages.render_chat_request = rendered


def _no_prefill() -> Any:
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import VLLMValidationError

    return create_error_response(VLLMValidationError(NO_PREFILL, parameter="messages"))


def _text_of(content: Any) -> str:
    """Return the text to be continued, of several parts the last."""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content or () if part.get("type") == "text"]
    return texts[-1] if texts else ""


def _ends_with(text: str, prompt: Any, renderer: Any) -> bool:
    """Return whether a prompt ends with a text, without white space, since templates trim."""
    rendered = prompt.get("prompt")
    if not isinstance(rendered, str):
        rendered = renderer.tokenizer.decode(prompt["prompt_token_ids"][-_LOOKED_AT_TOKENS:])
    looked_at = "".join(text.split())[-_LOOKED_AT_CHARS:]
    return "".join(rendered[-len(text) - _LOOKED_AT_CHARS :].split()).endswith(looked_at)


PATCH = Patch(
    name="message_prefill",
    seams=(
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.to_chat_completion_request",
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.render_chat_request",
    ),
    why="a message that a client has begun is closed, and the model begins another",
    upstream="not reported: /v1/messages renders a trailing assistant message as a finished turn",
    process="server",
)
