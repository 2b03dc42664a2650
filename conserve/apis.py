"""The APIs that turns come by: their paths, and what their answers look like on the wire.

What is said of streams is what vLLM 0.29 writes: an event's JSON on one ``data:`` line, and each
event as a part of its own.
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

# The fields that say how much output is wanted at most, each API's own.
OUTPUT_CAPS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

# Where a turn goes to, on a router as on an engine.
TURN_PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
# How the id of an answer begins that comes by Messages.
MESSAGE_ID = "msg_"
# What an engine answers as it stands.
TOKEN_PATHS = (TOKENIZE, DETOKENIZE, COUNT_TOKENS)


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an API's answers, as far as it is looked at in passing.

    Attributes:
        ends: how an event begins after which the answer is whole.
        error: how an event begins by which an engine says that it cannot go on.
        opens: how events begin that come before anything is generated.
        token: what each event that holds output has in it once; None where nearly all hold some.
        tool_call: what an answer has in it that calls a tool; within a text, its quotes would be
            escaped.
        after_error: what comes behind an error.
    """

    ends: tuple[bytes, ...]
    error: bytes
    opens: tuple[bytes, ...] = ()
    token: bytes | None = None
    tool_call: bytes = b""
    after_error: bytes = b""

    def shows_output(self, part: bytes) -> bool:
        """Whether a part of a stream has an event that comes once something was generated."""
        opening = sum(part.count(begins) for begins in self.opens)
        return not self.opens or part.count(b"\n\n") > opening

    def outputs_in(self, part: bytes) -> int:
        """How many events that hold output a part of a stream has."""
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
    """The form of the answers on a turn's path; of another path, as of a chat's."""
    return _FORMS.get(path, _CHAT)


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API, and what is said on it has that API's shape."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def is_dialogue(path: str) -> bool:
    """Whether a turn on this path has messages, by which its conversation can be recognised."""
    return path in TURN_PATHS and path != COMPLETIONS
