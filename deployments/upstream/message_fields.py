"""Has vLLM's Messages API give answers the fields that Anthropic's have.

- ``stop_sequence`` is in a body when it is null, too.
- An answer's id is ``msg_...`` and a call's is ``toolu_...``; some models have ids of their own.
- A body's ``stop_reason`` is ``tool_use`` only where there is a call. vLLM 0.32 says so of each
  answer that had to call a tool.
- A body has no content for a ``max_tokens`` of 0, which vLLM refuses; routers ask for a token.
"""

import functools
from contextvars import ContextVar
from typing import Any

from conserve.apis import MESSAGE_ID
from deployments.upstream.patch import Patch, of

_CHAT_ID = "chatcmpl-"
_CHAT_CALL_ID = "chatcmpl-tool-"
_CALL_ID = "toolu_"
# Set by the server for each request: whether its answer has nothing that was generated.
no_output: ContextVar[bool] = ContextVar("conserve_no_output", default=False)


def apply() -> None:
    from vllm.entrypoints.anthropic import serving

    class Message(serving.AnthropicMessagesResponse):  # type: ignore[misc]
        def model_post_init(self: Any, context: Any) -> None:
            super().model_post_init(context)
            if self.id.startswith(_CHAT_ID):
                self.id = MESSAGE_ID + self.id.removeprefix(_CHAT_ID)

        def model_dump(self: Any, **options: Any) -> dict[str, Any]:
            self.content = [_renamed(block) for block in self.content]
            if no_output.get():
                self.content, self.stop_reason, self.stop_sequence = [], "max_tokens", None
                self.usage.output_tokens = 0
            # Clients read these, and vLLM leaves them out when null.
            nulls = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
            return {**super().model_dump(**options), **nulls}

    event, reason_of = serving.AnthropicStreamEvent, serving._to_anthropic_stop_reason
    dump = event.model_dump_json

    @functools.wraps(dump)
    def dumped(self: Any, **options: Any) -> Any:
        # vLLM goes on to look for the call by its own id, in the block that it has made.
        self.content_block = _renamed(self.content_block)
        return dump(self, **options)

    @functools.wraps(reason_of)
    def stop_reason(finish_reason: Any, stop_reason: Any, tool_used: bool, **more: Any) -> Any:
        if finish_reason == "tool_calls" and not tool_used:
            finish_reason = "stop"
        return reason_of(finish_reason, stop_reason, tool_used, **more)

    serving.AnthropicMessagesResponse = Message
    event.model_dump_json = dumped
    serving._to_anthropic_stop_reason = stop_reason


def _renamed(block: Any) -> Any:
    """Return a block, or a copy with Anthropic's form of its id."""
    if block is None or not (block.id or "").startswith(_CHAT_CALL_ID):
        return block
    return block.model_copy(update={"id": _CALL_ID + block.id.removeprefix(_CHAT_CALL_ID)})


PATCH = Patch(
    name="message_fields",
    seams=of(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicMessagesResponse AnthropicMessagesResponse.stop_sequence "
        "AnthropicStreamEvent.model_dump_json AnthropicStreamEvent.content_block "
        "_to_anthropic_stop_reason",
    ),
    why="strict clients of Anthropic's miss fields, refuse ids, and look for calls that are not",
    upstream="not reported: /v1/messages's ids, null stop_sequence, max_tokens: 0",
    process="server",
)
