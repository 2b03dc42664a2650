"""The phases of a turn as its router sees them, for the turn's log line and its trace."""

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from conserve.turn import TurnStats

Name = Literal["recognition", "wait", "count", "encode", "prefill", "handoff", "decode"]
"""``recognition`` reads the request and its history; ``wait`` is for the table, for room, or in the
engine; ``count`` has an engine check the prompt; ``encode`` its images; ``prefill`` is on a
prefiller or on the decoder; ``handoff`` until the decoder has loaded the KV; ``decode`` from the
first token on."""


class Phase(NamedTuple):
    """One phase.

    Attributes:
        began_s, ended_s: by `time.perf_counter`.
        engine_id: None where no engine worked.
        failed: the name of the error that ended it, if one did.
    """

    name: Name
    began_s: float
    ended_s: float
    engine_id: str | None = None
    failed: str | None = None


class Phases:
    """The phases that a turn has had, in the order of their ends."""

    def __init__(self) -> None:
        self.all: list[Phase] = []

    @contextlib.contextmanager
    def during(self, name: Name, engine_id: str | None = None) -> Iterator[None]:
        """Note a phase that lasts as long as the ``with`` block."""
        began_s = time.perf_counter()
        failed: str | None = None
        try:
            yield
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            self.all.append(Phase(name, began_s, time.perf_counter(), engine_id, failed))

    def served(
        self,
        engine_id: str,
        sent_s: float,
        first_s: float | None,
        stats: TurnStats | None,
        failed: str | None = None,
    ) -> None:
        """Note what a decoder did from the time that it was sent the turn until now.

        The times that its engine tells are durations, since nodes' clocks differ. They are counted
        from the first token, which is seen here.

        Args:
            first_s: when its first token came; None for an answer in one piece.
            stats: the decoder's; None if it did not get to the end.
        """
        now_s = time.perf_counter()
        if stats is not None:
            if first_s is None:
                first_s = max(sent_s, now_s - (stats.decode_s or 0.0))
            if stats.engine_prefill_s is not None and stats.engine_queued_s is not None:
                ran_s = max(sent_s, first_s - stats.engine_prefill_s)
                came_s = max(sent_s, ran_s - stats.engine_queued_s)
                before: Name = "handoff" if stats.lmcache_tokens else "wait"
                self.all.append(Phase(before, came_s, ran_s, engine_id))
                self.all.append(Phase("prefill", ran_s, first_s, engine_id))
        began_s = sent_s if first_s is None else first_s
        self.all.append(Phase("decode", began_s, now_s, engine_id, failed))

    def seconds(self) -> dict[str, float]:
        """Return how long the turn spent in each phase, over all its attempts."""
        took_s: dict[str, float] = {}
        for one in self.all:
            took_s[one.name] = took_s.get(one.name, 0.0) + one.ended_s - one.began_s
        return took_s
