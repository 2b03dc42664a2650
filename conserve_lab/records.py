"""Records of what a workload asks for and what was seen of it, and their files.

A `Script` is one conversation as a workload plans it. The driver asks it for the next request,
sends it, and gives it what came back. Metrics and reports see only `TurnRecord`, made by a driver
or a simulator. All times are seconds on one monotonic clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import msgspec

Outcome = Literal["completed", "failed", "timeout", "unfinished"]


class SharedPrefix(NamedTuple):
    """A beginning of a prompt that others have, too: its length, and a key of its last part."""

    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One model call to make.

    Attributes:
        gap_s: how long after the previous turn's end, or the conversation's arrival, it is sent.
        body: makes the JSON body when the turn is sent, so that long prompts do not wait in memory.
        prompt_tokens: where it is known exactly.
        reused_tokens: length of the prefix that it shares with the conversation's previous prompt.
        output_tokens: forced output length, if any.
        effective: whether the output is for the user rather than a tool call; None: the answer
            tells.
        tool: what the answer calls, as simulated; see `conserve.history.TurnStats`.
        shared: the known prefixes that other conversations' prompts have, too, the shortest first.
    """

    gap_s: float
    path: str
    body: Callable[[], dict[str, Any]]
    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    output_tokens: int | None = None
    effective: bool | None = None
    tool: str | None = None
    shared: tuple[SharedPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A chat message's parts, for a script whose next turn depends on them."""

    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()


class Script(Protocol):
    @property
    def conversation(self) -> str:
        """Its id, unique in the run; of a simulated tenant's, as `identity.scoped` has it."""

    def next(self, answer: Answer | None) -> TurnRequest | None:
        """Return the next turn, given the previous one's answer (None before the first); None:
        over.

        Called once a turn, and not after a turn that failed.
        """


@dataclass(slots=True)
class TurnRecord:
    """One turn as its client saw it.

    Attributes:
        turn: its number in the conversation, from 1.
        planned_s: when the workload wanted it sent.
        sent_s: later than planned where the driver lagged.
        first_token_s: when the first part of the stream that carries output came, reasoning and
            tool calls included; None if there was none.
        token_times_s: when each output token's part of the stream came; several may come in one.
        last_token_s: of a simulated turn, whose tokens' times between first and last are not known.
        ended_s: when its last byte came, or it was given up.
        outcome: ``unfinished``: the run ended first.
        error: what the server or the connection said.
        effective: whether the output was for the user, not a tool call (TTFET counts from it).
        prompt_tokens, output_tokens: as the server counted, else as planned.
        cached_tokens, server: found in caches, and the replica, where the server says so.
        reused_tokens: prompt tokens shared with the previous prompt, as planned.
    """

    system: str
    conversation: str
    turn: int
    planned_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    first_token_s: float | None = None
    token_times_s: tuple[float, ...] = ()
    last_token_s: float | None = None
    error: str | None = None
    effective: bool = False
    last: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    server: str | None = None
    reused_tokens: int | None = None


# --- Files ----------------------------------------------------------------------------------------


class RecordWriter:
    """Writes records to a file of JSON lines, as a context manager, over what was there.

    Each line is on its way to the disk at once, so a run that dies leaves what it saw.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        self._file = self._path.open("wb", buffering=0)
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write(self, record: TurnRecord) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")


def write_parquet(records: Sequence[TurnRecord], path: Path) -> None:
    """Write one Parquet file, with a column for each field."""
    # pyarrow takes a while to import, and is rarely asked for.
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([asdict(record) for record in records])
    pyarrow.parquet.write_table(table, path)
