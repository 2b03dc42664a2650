"""Reads hints for scheduling, which a client gives beside a conversation's messages.

Each system has its own names for them; `NAMES` lists those that are understood.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from conserve.identity import agentic_context

# Times of more than a day are no hint.
MOST_S = 86_400.0
MOST_PRIORITY = 2**31 - 1
# A second of a background turn's wait, as a share of one of another's.
BACKGROUND = 0.1

_NUMBER = re.compile(r"[+-]?[0-9]{1,12}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


class InvalidHint(ValueError):
    """A hint by a name of our own that cannot be used; the message tells the client why.

    ``source`` is the header.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source} {problem}")
        self.source = source


@dataclass(frozen=True, slots=True)
class Hints:
    """A request's hints; None where it gives none.

    Attributes:
        priority: higher is more important; 0 is the default, and less is in the background.
        deadline_s, first_token_s: until when the answer and its first token are wanted.
        expected_resume_s: how long after the answer the next turn is expected.
        last_step: whether no turn will follow; False means that one will.
        parent: the conversation that began this one, see `conserve.identity.parent_id`.
    """

    priority: int | None = None
    deadline_s: float | None = None
    first_token_s: float | None = None
    expected_resume_s: float | None = None
    last_step: bool | None = None
    parent: str | None = None

    @property
    def due_in_s(self) -> float:
        """Return after what time without a token the turn is not in time any more."""
        given_s = (one for one in (self.deadline_s, self.first_token_s) if one is not None)
        return min(given_s, default=math.inf)

    def in_time(self, latency_s: float, ttft_s: float) -> bool | None:
        """Return whether an answer kept the times that were given; None if none were."""
        if self.due_in_s == math.inf:
            return None
        late = self.first_token_s is not None and ttft_s > self.first_token_s
        return not late and (self.deadline_s is None or latency_s <= self.deadline_s)

    @property
    def background(self) -> bool:
        """Return whether the turn waits for others, as one with a priority below 0 does."""
        return self.priority is not None and self.priority < 0


@dataclass(frozen=True, slots=True)
class Name:
    """A name by which clients give a hint.

    Attributes:
        name: the header, or the body's field, with dots for fields within another.
        read: converts a value, which is any JSON or a header's string; None if it is no hint.
        must_be: what a value has to be, if others are refused; None if they are ignored.
    """

    meaning: str
    name: str
    source: str
    read: Callable[[Any], Any]
    in_body: bool = False
    must_be: str | None = None


def _number(value: Any) -> float | int | None:
    """Return a finite number, or a header's text of one; else None, also for a truth value."""
    if isinstance(value, str) and _NUMBER.fullmatch(text := value.strip()):
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    if type(value) is int:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def _whole(value: Any, least: int, most: int, sign: int = 1) -> int | None:
    found = _number(value)
    return sign * found if isinstance(found, int) and least <= sign * found <= most else None


def _seconds(value: Any, unit_s: float = 1.0) -> float | None:
    found = _number(value)
    # An int may be longer than any float.
    if found is None or not 0 <= found <= MOST_S / unit_s:
        return None
    return found * unit_s


def _flag(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _not(value: Any) -> bool | None:
    found = _flag(value)
    return None if found is None else not found


def _ends(context: Any) -> bool | None:
    return _not(agentic_context(context).get("expected_resume"))


def _if(value: Any, word: str, means: bool | int) -> bool | int | None:
    return means if value == word else None


_PRIORITY = partial(_whole, least=-MOST_PRIORITY - 1, most=MOST_PRIORITY)
# In vLLM the lowest goes first.
_LOWEST_FIRST = partial(_PRIORITY, sign=-1)
_MILLISECONDS = partial(_seconds, unit_s=0.001)
_FLEX, _CLOSES = partial(_if, word="flex", means=-1), partial(_if, word="close", means=True)

_A_PRIORITY = f"a whole number from {-MOST_PRIORITY - 1} to {MOST_PRIORITY}, the highest first"
_SOME_SECONDS = f"a number of seconds from 0 to {MOST_S:g}"

# For each meaning, the first name with a hint wins. Headers of Dynamo and vLLM go before their
# fields, as they do there.
NAMES = (
    Name("priority", "X-ConServe-Priority", "ConServe", _PRIORITY, must_be=_A_PRIORITY),
    Name("priority", "x-dynamo-request-priority", "Dynamo", _PRIORITY),
    Name("priority", "nvext.agent_hints.priority", "Dynamo", _PRIORITY, in_body=True),
    Name("priority", "X-Vllm-Priority", "vLLM", _LOWEST_FIRST),
    # SGLang has the same field, by default with the highest first. Engines here are vLLM's.
    Name("priority", "priority", "vLLM", _LOWEST_FIRST, in_body=True),
    Name("priority", "service_tier", "OpenAI", _FLEX, in_body=True),
    Name("deadline_s", "X-ConServe-Deadline-S", "ConServe", _seconds, must_be=_SOME_SECONDS),
    Name("deadline_s", "x-envoy-expected-rq-timeout-ms", "Envoy", _MILLISECONDS),
    Name("first_token_s", "X-ConServe-First-Token-S", "ConServe", _seconds, must_be=_SOME_SECONDS),
    Name("first_token_s", "x-slo-ttft-ms", "llm-d", _MILLISECONDS),
    Name("first_token_s", "nvext.router.ttft_target", "Dynamo", _MILLISECONDS, in_body=True),
    Name(
        "expected_resume_s",
        "X-ConServe-Expected-Resume-S",
        "ConServe",
        _seconds,
        must_be=_SOME_SECONDS,
    ),
    Name("last_step", "X-ConServe-Last-Step", "ConServe", _flag, must_be="true or false"),
    Name("last_step", "x-dynamo-session-final", "Dynamo", _flag),
    Name("last_step", "nvext.session_control.action", "Dynamo, earlier", _CLOSES, in_body=True),
    Name("last_step", "is_last_step", "Continuum", _flag, in_body=True),
    # The field expected_resume in it.
    Name("last_step", "vllm_xargs.agentic_context", "AgentInfer", _ends, in_body=True),
    Name("last_step", "agent_hint.expected_resume", "AgentInfer", _not, in_body=True),
)

_NONE = Hints()
_KEYS = tuple(
    (name, tuple(name.name.split(".") if name.in_body else [name.name.lower()])) for name in NAMES
)


def hints(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hints:
    """Read a request's hints; ``headers`` have lower-cased names.

    Raises:
        InvalidHint: a name of our own has a wrong value. Others' wrong values are ignored: they may
            be meant for what is behind, or of another version.
    """
    found: dict[str, Any] = {}
    for name, (first, *inner) in _KEYS:
        value = body.get(first) if name.in_body else headers.get(first, "").strip() or None
        if value is None or name.meaning in found:
            continue
        for key in inner:
            value = value.get(key) if isinstance(value, dict) else None
        hint = name.read(value)
        if hint is not None:
            found[name.meaning] = hint
        elif name.must_be is not None:
            raise InvalidHint(name.name, f"must be {name.must_be}; mend it or leave it out")
    return Hints(**found) if found else _NONE
