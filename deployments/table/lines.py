"""The log of turns and events: one line each, and never a prompt or an answer's text.

It is ``conserve.log`` beside Ray Serve's own logs, for each application, and it is bounded. What
the table itself has to say is in there too, and goes to Ray's log of the process as well.
"""

import json
import logging
import os
import re
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

import ray

from conserve import identity
from conserve.events import Event
from conserve.turn import TurnKey, TurnStats

Format = Literal["text", "json"]

# Everything that this process logs is below it.
_ROOT = "conserve"
lines = logging.getLogger("conserve.lines")

# The newest 256 MiB: a million turns or so.
_FILE_BYTES = 64 * 2**20
_OLDER_FILES = 3

# In a turn's own line, reported by clients for each call, or too frequent.
_NOT_LOGGED = ("start", "prefilled", "end", "answered", "tool_start", "tool_end", "window")
# These tell of engines; there are few, and they belong in the application's log, too.
_OF_ENGINES = ("engine_ready", "engine_lost", "engine_left")
_PLAIN = re.compile(r"[\w.:/@+#-]+", re.ASCII)


class LineFormatter(logging.Formatter):
    """Writes a record as a JSON object, or as ``time level event name=value ...``.

    A record's ``fields`` are what it tells beside its message, which is the event's name then.
    """

    def __init__(self, format_: Format) -> None:
        super().__init__()
        self._json = format_ == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        at = f"{seconds}.{int(record.msecs):03d}Z"
        if self._json:
            name = "message" if fields is None else "event"
            return json.dumps(
                {"time": at, "level": record.levelname, name: message} | (fields or {})
            )
        said = "".join(f" {name}={_shown(value)}" for name, value in (fields or {}).items())
        return f"{at} {record.levelname} {message}{said}"


def _shown(value: Any) -> str:
    # A client's id may have spaces and line breaks.
    text = value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def log_to(path: Path, format_: Format) -> None:
    """Have all lines of this process written to a file, and the few about engines to stderr."""
    formatter = LineFormatter(format_)
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_OLDER_FILES)
    # Ray carries what comes here to the application's log, through three processes.
    to_stderr = logging.StreamHandler()
    to_stderr.addFilter(lambda record: not getattr(record, "only_file", False))
    root = logging.getLogger(_ROOT)
    for handler in (to_file, to_stderr):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def log_in_session(format_: Format, model: str = "") -> None:
    """Log to this actor's application's file of Ray's session; without Ray, nowhere.

    With several models each has a file, which its ``model`` names.
    """
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    # By `deployments.detached.actor_name` it is conserve:APPLICATION:...
    application = (context.get_actor_name() or "::").split(":")[1]
    own = "_".join(filter(None, (application, model)))
    name = f"conserve_{re.sub(r'[^A-Za-z0-9_.-]', '_', own)}.log"
    folder = os.path.join(context.get_temp_dir(), context.get_session_name(), "logs", "serve")
    try:
        log_to(Path(folder, name), format_)
    except OSError as error:
        # It serves without.
        logging.getLogger("conserve.table").warning("turns and events are not logged: %s", error)


def log_event(event: Event) -> None:
    """Write an event's line, unless it is one within a turn."""
    if event.kind in _NOT_LOGGED or not lines.isEnabledFor(logging.INFO):
        return
    level = logging.WARNING if event.kind == "engine_lost" else logging.INFO
    fields = whose(event.history_id) | event.details
    told = {"fields": fields, "only_file": event.kind not in _OF_ENGINES}
    lines.log(level, event.kind, extra=told)


def log_turn(turn: TurnKey | None, stats: TurnStats) -> None:
    """Write the line of a turn that has ended, however it did, and why it was slow if it was."""
    if lines.isEnabledFor(logging.INFO):
        lines.info("turn", extra={"fields": turn_fields(turn, stats), "only_file": True})


# Names in a turn's line, and of the record's fields.
_SERVED = (
    ("outcome", "outcome"),
    ("error", "error"),
    ("engine", "decoder_id"),
    ("prefiller", "prefiller_id"),
    ("placement", "placement"),
    ("latency_s", "latency_s"),
    ("ttft_s", "ttft_s"),
)
COMPUTED = (
    ("prompt_tokens", "prompt_tokens"),
    ("cached_tokens", "decoder_cached_tokens"),
    ("loaded_tokens", "lmcache_tokens"),
    ("output_tokens", "output_tokens"),
)


def turn_fields(turn: TurnKey | None, stats: TurnStats) -> dict[str, Any]:
    """Return what a turn's line tells, without what is not known of it."""
    fields: dict[str, Any] = {
        "request_id": stats.request_id,
        **whose("" if turn is None else turn.history_id),
        "turn": None if turn is None else turn.turn_id,
        **{name: getattr(stats, field) for name, field in _SERVED},
        **{f"{name}_s": took_s for name, took_s in (stats.phases or {}).items()},
        "continued": stats.continued or None,
    }
    if stats.tenant is not None:
        fields["tenant"] = stats.tenant
    if stats.prompt_tokens:
        fields |= {name: getattr(stats, field) for name, field in COMPUTED}
    fields["why"] = stats.why
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


def whose(history_id: str) -> dict[str, Any]:
    """Return what tells the history of an event; nothing for an event of an engine."""
    if not history_id:
        return {}
    tenant, number = identity.tenant_of(history_id), identity.number_of(history_id)
    return {
        "conversation": identity.own_id(history_id),
        **({} if tenant is None else {"tenant": tenant}),
        **({} if number is None else {"history": number}),
    }
