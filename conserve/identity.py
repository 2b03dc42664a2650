"""Finds the conversation id that a request states, in its headers or its body.

`SOURCES` lists every name that is understood, in order of precedence. A request without any is
recognised by its messages (``conserve.recognition``). An id only says which conversation a turn
belongs to. Its histories are told apart by their messages, so a name that many share does no harm,
except that they are listed and ended together.

An agent within a conversation (`AGENT_HEADERS`) is a conversation of its own, which its clients
address as ``conversation/agent``.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Long enough for several UUIDs joined together, short enough for a header, a URL and a log line.
MAX_ID_CHARS = 256

FINAL_HEADER = "x-dynamo-session-final"

_CLAUDE_AGENT_HEADER = "x-claude-code-agent-id"
_SESSION_HEADER = "session-id"
_THREAD_HEADER = "thread-id"
_AGENTIC_CONTEXT = "agentic_context"

# A longer JSON text in a field is not read. AgentInfer's limit.
_MOST_JSON_CHARS = 16 * 1024

_Read = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Source:
    """A name by which clients state which conversation a request belongs to.

    Attributes:
        strict: whether a value that cannot be an id is refused, since the name is for a server like
            this one. Else such a value is hashed, or ignored if it is no string.
        read: finds the id in the field's value; None if the value is the id.
    """

    name: str
    sender: str
    in_body: bool = False
    strict: bool = False
    read: _Read | None = None


def agentic_context(value: Any) -> dict[str, Any]:
    """Read an ``agentic_context``, which is an object or the JSON of one; else it is empty."""
    found = _json_object(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else {}


def _context_id(value: Any) -> str | None:
    context = agentic_context(value)
    program, session, agent = (
        _text(context.get(name)) for name in ("program_id", "session_id", "agent_id")
    )
    if program is not None:
        return program
    session = session or _text(context.get("task_id"))
    # "lead" is the session's own agent.
    if session is None or agent in (None, "lead"):
        return session
    return within(_usable(session), agent)


def _claude_session(value: Any) -> str | None:
    """Return the session within Claude Code's ``user_id``; None for others' ids."""
    if not isinstance(value, str):
        return None
    found = _json_object(value)
    if found is not None:
        return _text(found.get("session_id"))
    user, mark, session = value.rpartition("_session_")
    if not mark or not user.startswith("user_") or "_account_" not in user:
        return None
    return session


# The first that has an id is taken. Names of the first version come first, so that later ones
# change no request's id; names that many conversations share come last. Headers come before fields
# because a proxy can set them without touching the body.
SOURCES = (
    Source("X-Conversation-Id", "ConServe's own", strict=True),
    Source("x-session-id", "opencode, crush; what vLLM itself reads", strict=True),
    Source(_SESSION_HEADER, "Codex: the session, with all its threads", strict=True),
    Source("X-Dynamo-Session-ID", "clients of NVIDIA Dynamo", strict=True),
    Source("x-claude-code-session-id", "Claude Code from 2.1.86 on", strict=True),
    Source("X-SMG-Routing-Key", "clients of SGLang's gateway", strict=True),
    Source("conversation_id", "ConServe's own", in_body=True, strict=True),
    Source("program_id", "clients of ThunderAgent", in_body=True, strict=True),
    Source("session_id", "clients of vLLM, SGLang and Ray Serve", in_body=True, strict=True),
    Source("job_id", "clients of Continuum and MARS", in_body=True, strict=True),
    Source("x-session-affinity", "opencode, crush"),
    Source("x-opencode-session", "opencode and goose, to opencode's own gateway"),
    Source("x-opencode-session-id", "opencode"),
    Source("x-litellm-session-id", "clients of LiteLLM's proxy; OpenHands"),
    Source("agent-session-id", "goose"),
    Source("x-deepseek-harness-session-id", "DeepSeek's harness"),
    Source(_THREAD_HEADER, "Codex: a thread of a session"),
    Source("session_id", "Codex, older"),
    Source(f"vllm_xargs.{_AGENTIC_CONTEXT}", "AgentInfer", in_body=True, read=_context_id),
    Source("metadata.session_id", "clients of LiteLLM's proxy", in_body=True),
    Source("metadata.user_id", "Claude Code: user and session", in_body=True, read=_claude_session),
    Source("prompt_cache_key", "OpenAI's clients; may be a whole application's", in_body=True),
)

HEADERS = tuple(source.name for source in SOURCES if not source.in_body)

# Our own fields, which an engine does not know and does not get.
BODY_FIELDS = tuple(source.name for source in SOURCES if source.in_body and source.strict)

# Headers that name the agent within the conversation.
AGENT_HEADERS = {
    _CLAUDE_AGENT_HEADER: "Claude Code from 2.1.139 on: a sub-agent; the main one sends none",
    _THREAD_HEADER: f"Codex: beside {_SESSION_HEADER}, where both differ",
}

# Headers that name the parent of a sub-agent's conversation, the first of which that has a value is
# taken; and whether that is the parent's conversation, or an agent of the same session.
PARENT_HEADER = "X-ConServe-Parent-Id"
PARENT_HEADERS = {
    PARENT_HEADER: ("ConServe's own", True),
    "x-parent-session-id": ("opencode", True),
    "X-Dynamo-Parent-Session-ID": ("clients of NVIDIA Dynamo", True),
    "x-claude-code-parent-agent-id": ("Claude Code, for an agent of a sub-agent", False),
    "x-codex-parent-thread-id": ("Codex", False),
}

_GENERATED = re.compile(r"conv-[0-9a-f]{24}")

# Error messages show no more of a refused value, which may be long, or a secret.
_MAX_ECHO_CHARS = 40

# Between a tenant and its client's own id. No client's id has it, since it is not printable, but it
# may stand in a header.
_SCOPE = "\t"
# Between a conversation and the number of a history other than its first.
_FURTHER = "\t\t"

_WITHIN = "/"

_KEYS = tuple(
    (source, tuple(source.name.split(".") if source.in_body else [source.name.lower()]))
    for source in SOURCES
)


class InvalidConversationId(ValueError):
    """A stated id in ``source`` (a header or field) that cannot be used; the message says why."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source} {problem}")
        self.source = source


def explicit_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the conversation id that a request states, or None.

    The first of `SOURCES` that has an id wins. An id is at most ``MAX_ID_CHARS`` printable ASCII
    characters, and neither ``.`` nor ``..``, so that it can stand in headers, URLs and logs. An
    agent within the conversation is part of it, see `within`.

    Args:
        headers: with lower-cased names.
        body: parsed from JSON; any of it may be any JSON.

    Raises:
        InvalidConversationId: a strict source's value breaks that rule or is not a string.
    """
    found = _stated(headers, body)
    if found is None:
        return None
    agent = _agent(headers)
    return found if agent is None else within(found, agent)


def parent_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the id of the conversation that began this one, or None.

    Without a header for it, that of an agent within a conversation is the conversation itself.

    Raises:
        InvalidConversationId: our own header's value cannot be an id.
    """
    stated = _stated(headers, body)
    for name, (_, is_whole) in PARENT_HEADERS.items():
        if value := headers.get(name.lower(), "").strip():
            if name == PARENT_HEADER:
                return _required(name, value)
            # The main agent, or thread, has the session's id.
            if is_whole or stated is None or value == stated or not _agent(headers):
                return _usable(value)
            return within(stated, value)
    return stated if _agent(headers) else None


def _stated(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    for source, (name, *inner) in _KEYS:
        value = body.get(name) if source.in_body else headers.get(name)
        for key in inner:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:  # clients write null for an option that is not set
            continue
        if source.strict:
            found = _required(source.name, value)
        else:
            text = _text(value) if source.read is None else source.read(value)
            found = None if text is None else _usable(text.strip())
        if found:
            return found
    return None


def _agent(headers: Mapping[str, str]) -> str | None:
    agent = headers.get(_CLAUDE_AGENT_HEADER, "").strip()
    if agent:
        return agent
    session = headers.get(_SESSION_HEADER, "").strip()
    thread = headers.get(_THREAD_HEADER, "").strip()
    # The main thread has the session's id. Without a session the thread is the conversation.
    return thread if session and thread and thread != session else None


def within(conversation_id: str, agent: str) -> str:
    """Return the id of an agent within a conversation, ``conversation/agent``.

    Text that is not fit for an id is hashed, and so is the end of an id that is too long.
    """
    # The last slash is then the one between them.
    own = _usable(agent).replace("%", "%25").replace(_WITHIN, "%2F")
    whole = f"{conversation_id}{_WITHIN}{own}"
    if len(whole) <= MAX_ID_CHARS:
        return whole
    hashed = _hashed(whole)
    return conversation_id[: MAX_ID_CHARS - len(hashed) - 1] + _WITHIN + hashed


def is_final(headers: Mapping[str, str]) -> bool:
    return headers.get(FINAL_HEADER, "").strip().lower() == "true"


def without_identity(body: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``body`` without fields that name a conversation and that an engine may refuse.

    These are our own fields, and an ``agentic_context`` that is an object: vLLM takes no objects in
    ``vllm_xargs``.
    """
    own = {name: value for name, value in body.items() if name not in BODY_FIELDS}
    extra = own.get("vllm_xargs")
    if isinstance(extra, dict) and isinstance(extra.get(_AGENTIC_CONTEXT, ""), dict | None):
        own["vllm_xargs"] = {k: v for k, v in extra.items() if k != _AGENTIC_CONTEXT}
    return own


def new_id() -> str:
    """Return a new id, such as ``conv-0f3a...`` (24 hexadecimal digits)."""
    return f"conv-{secrets.token_hex(12)}"


def is_generated(conversation_id: str) -> bool:
    """Return whether an id is one of `new_id`, and not a client's own."""
    return _GENERATED.fullmatch(own_id(conversation_id)) is not None


def scoped(tenant: str | None, conversation_id: str) -> str:
    """Return a client's id as it is kept, so that no other tenant has it."""
    return conversation_id if tenant is None else f"{tenant}{_SCOPE}{conversation_id}"


def further(conversation_id: str, number: int) -> str:
    """Return the id of a history of a conversation other than its first."""
    return f"{conversation_id}{_FURTHER}{number}"


def is_further(history_id: str) -> bool:
    return _FURTHER in history_id


def number_of(history_id: str) -> int | None:
    """Return a history's number; None for the one with its conversation's id."""
    _, further, number = history_id.rpartition(_FURTHER)
    return int(number) if further else None


def conversation_of(history_id: str) -> str:
    """Return the id, as it is kept, of the conversation that a history belongs to."""
    # Called several times a turn; most ids have no tab.
    return history_id.partition(_FURTHER)[0] if _SCOPE in history_id else history_id


def tenant_of(conversation_id: str) -> str | None:
    """Return the tenant of an id as it is kept, or of a history's; None if it has none."""
    if _SCOPE not in conversation_id:
        return None
    tenant, scope, _ = conversation_of(conversation_id).partition(_SCOPE)
    return tenant if scope else None


def own_id(conversation_id: str) -> str:
    """Return an id, or that of a history's conversation, as its client knows it."""
    if _SCOPE not in conversation_id:
        return conversation_id
    return conversation_of(conversation_id).rpartition(_SCOPE)[2]


def _required(source: str, value: Any) -> str | None:
    """Return the id that a strict source states; None if it is empty."""
    found = value.strip() if isinstance(value, str) else None
    if found == "" or (found is not None and is_id(found)):
        return found or None
    said = type(value).__name__ if found is None else f"{_shown(found)}, {len(found)} characters"
    raise InvalidConversationId(
        source,
        f"must be a string of at most {MAX_ID_CHARS} printable ASCII characters, neither . nor .., "
        f"which clients remove from URLs; send another id than this ({said}), or leave it out",
    )


def is_id(value: str) -> bool:
    fits = 0 < len(value) <= MAX_ID_CHARS and value not in (".", "..")
    return fits and value.isascii() and value.isprintable()


def _usable(value: str) -> str:
    return value if not value or is_id(value) else _hashed(value)


def _hashed(value: str) -> str:
    return "hashed-" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _text(value: Any) -> str | None:
    return (value.strip() or None) if isinstance(value, str) else None


def _json_object(text: str) -> dict[str, Any] | None:
    if len(text) > _MOST_JSON_CHARS or not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _shown(value: str) -> str:
    """Return the start of a refused value, quoted and escaped so that it is harmless in any log."""
    escaped = ascii(value[:_MAX_ECHO_CHARS])[1:-1]
    if len(value) <= _MAX_ECHO_CHARS and len(escaped) <= _MAX_ECHO_CHARS:
        return f'"{escaped}"'
    return f'"{escaped[:_MAX_ECHO_CHARS]}"...'
