"""Words the refusals of turns that cannot be served, now or ever."""

from conserve.admission import QueueFull
from conserve.pausing.tools import MOST_RUNNING
from conserve.tenants.limits import Over
from deployments.messages import Refusal

# Why a turn is refused that found no room, in metrics and events.
QUEUE_REASONS = ("queue_full", "timeout")

UNAVAILABLE = Refusal(
    503, "no engine is ready to serve; try again shortly", "unavailable", retry_after_s=5
)

LAST_ENGINE = Refusal(
    409,
    "no other engine can take this one's conversations; add one before you drain it",
    "last_engine",
)

TOO_MANY_TOOLS = Refusal(
    400,
    f"{MOST_RUNNING} tools of this history run already; report those that have ended",
    "too_many_tools",
)


def queue_full(full: QueueFull) -> Refusal:
    return Refusal(429, str(full), "queue_full", full.retry_after_s)


def timed_out(prompt_tokens: int, timeout_s: float, retry_after_s: int) -> Refusal:
    return Refusal(
        429,
        f"no decoder had room for {prompt_tokens} tokens within {timeout_s:g} s; try again later",
        "queue_timeout",
        retry_after_s,
    )


def never_fits(prompt_tokens: int, largest_tokens: int) -> Refusal:
    return Refusal(
        400,
        f"this request has {prompt_tokens} tokens, and a decoder holds {largest_tokens} at most; "
        "send fewer prompts at a time",
        "context_length_exceeded",
    )


def over_limit(tenant: str, over: Over) -> Refusal:
    what = {
        "turns": "turns at a time; wait for one to end",
        "held_tokens": "tokens of KV for its conversations; end some of them",
        "conversations": "live conversations; end some of them",
        "new_per_minute": "new conversations a minute; wait",
    }[over.limit]
    message = f"the limit {over.limit} of tenant {tenant!r} is reached: {over.allowed} {what}"
    if over.never:
        message = (
            f"this conversation alone is over the limit {over.limit} of tenant {tenant!r}, "
            f"{over.allowed}; send a shorter prompt"
        )
        return Refusal(400, message, "tenant_limit")
    return Refusal(429, message, "tenant_limit", over.retry_after_s)
