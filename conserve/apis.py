"""The APIs that turns come by: their paths, and the form of their answers.

Streams are as vLLM 0.32 writes them: an event's JSON on one ``data:`` line, and each event as a
part of its own.
"""

from dataclasses import dataclass

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
COUNT_INPUT = "/v1/responses/input_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

# Each API's field for the most output tokens.
OUTPUT_CAPS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

# Paths of turns, on routers and on engines.
TURN_PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
# Prefix of the ids of Messages' answers.
MESSAGE_ID = "msg_"
# Paths that are passed to an engine unchanged.
TOKEN_PATHS = (TOKENIZE, DETOKENIZE, COUNT_TOKENS)


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an API's answers, as far as they are looked at in passing.

    Attributes:
        ends, error, opens: beginnings of the last events, of an error, and of the first events.
        token: occurs once in each event with output; None if nearly all events have some.
        tool_call: occurs in an answer that calls a tool; its quotes would be escaped in a text.
        after_error: what follows an error.
        keep_alive: an event without content, for a stream that would be silent.
    """

    ends: tuple[bytes, ...]
    error: bytes
    opens: tuple[bytes, ...] = ()
    token: bytes | None = None
    tool_call: bytes = b""
    after_error: bytes = b""
    keep_alive: bytes = b": keep-alive\n\n"

    def shows_output(self, part: bytes) -> bool:
        """Return whether a part of a stream has an event that comes after the first token."""
        opening = sum(part.count(begins) for begins in self.opens)
        return not self.opens or part.count(b"\n\n") > opening

    def outputs_in(self, part: bytes) -> int:
        if self.token is not None:
            return part.count(self.token)
        if part.startswith(self.ends):
            return 0
        # Several events may have come together.
        events = part.count(b"\n\n") - any(part.endswith(end + b"\n\n") for end in self.ends)
        return max(events, 1)


_CHAT = Form(
    ends=(b"data: [DONE]",),
    error=b'data: {"error"',
    tool_call=b'"tool_calls":[{',
    after_error=b"data: [DONE]\n\n",
)
_MESSAGES = Form(
    ends=(b"event: message_stop\n",),
    error=b"event: error\n",
    token=b"event: content_block_delta\n",
    tool_call=b'"type":"tool_use"',
    keep_alive=b'event: ping\ndata: {"type": "ping"}\n\n',
)
_RESPONSES = Form(
    ends=(
        b"event: response.completed\n",
        b"event: response.incomplete\n",
        b"event: response.failed\n",
    ),
    error=b"event: error\n",
    opens=(b"event: response.created\n", b"event: response.in_progress\n"),
    token=b".delta\ndata: ",
    tool_call=b'"type":"function_call"',
)
_FORMS = {CHAT: _CHAT, COMPLETIONS: _CHAT, MESSAGES: _MESSAGES, RESPONSES: _RESPONSES}


def form_of(path: str) -> Form:
    """Return the form of the answers on a path; unknown paths are like chats."""
    return _FORMS.get(path, _CHAT)


def is_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def is_dialogue(path: str) -> bool:
    """Return whether a turn on this path has messages to recognise it by."""
    return path in TURN_PATHS and path != COMPLETIONS
