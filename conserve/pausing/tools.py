"""Follows what histories wait for between turns: tools that run, and clients' reports."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conserve.history import History
from conserve.pausing.times import ToolTimes

MOST_NAME_CHARS = 64
# Of one history at a time: a client with more reports no ends.
MOST_RUNNING = 64
# Names beyond these are left out, so that calls of many tools have few names.
_MOST_NAMED = 3


def tool_called(answer: Mapping[str, Any]) -> str:
    """Return the name of the tool that an answer calls; of several, sorted; empty if it calls none.

    The next turn comes when the slowest of them is done, so several are a tool of their own.
    """
    calls = answer.get("tool_calls")
    functions = [
        call.get("function")
        for call in (calls if isinstance(calls, list | tuple) else ())
        if isinstance(call, Mapping)
    ]
    names = {str(one.get("name") or "") for one in functions if isinstance(one, Mapping)}
    called = ",".join(sorted(names)[:_MOST_NAMED])[:MOST_NAME_CHARS]
    return "".join(char if char.isprintable() else "?" for char in called) or "?" * bool(functions)


@dataclass(frozen=True, slots=True)
class ToolReport:
    """A client's report on a tool that it runs; ``call_id`` None means any of its name."""

    tool: str
    call_id: str | None = None
    ended: bool = False


class Running(NamedTuple):
    tool: str
    call_id: str | None
    started_s: float


class Wait(NamedTuple):
    """The tool that an idle history waits for; after its end the turn should come at once."""

    tool: str | None
    since_s: float
    tool_ended: bool = False


class TooManyTools(Exception):
    pass


@dataclass(slots=True)
class _Reported:
    running: list[Running] = field(default_factory=list)
    ended: Wait | None = None


class RunningTools:
    """The tools of each history that run, as their clients report it.

    Reports are forgotten when the history's next turn begins, or it ends. While a tool runs, the
    history waits for that one from its start on, whatever its answer called. After the last one's
    end its turn should come at once.

    Attributes:
        times: of these tools, and of those that answers have called and no client reports.
    """

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}
        self.times = ToolTimes()

    def __len__(self) -> int:
        return len(self._reported)

    def running(self, history_id: str) -> Collection[Running]:
        reported = self._reported.get(history_id)
        return () if reported is None else reported.running

    def report(
        self, history_id: str, report: ToolReport, now_s: float, in_turn: bool = False
    ) -> float | None:
        """Note what a client says, and return how long a tool ran that is done now.

        A start that was reported before, by its call's id, changes nothing; nor does an end without
        a start while a turn of the history runs, since it comes late. Returns None if no start is
        known.

        Raises:
            TooManyTools: `MOST_RUNNING` of them run.
        """
        meant = _find(self.running(history_id), report)
        if report.ended and meant is None and in_turn:
            return None
        reported = self._reported.setdefault(history_id, _Reported())
        if not report.ended:
            if meant is None or report.call_id is None:
                if len(reported.running) >= MOST_RUNNING:
                    raise TooManyTools
                started = Running(report.tool, report.call_id, now_s)
                reported.running.append(started)
                reported.ended = None
                # Clients that report no tools are slower to come back, so their times are apart.
                self.times.begins((history_id, started), (report.tool, "reported"), now_s)
            self.times.drop(history_id)
            return None
        self.times.drop(history_id)
        if meant is not None:
            reported.running.remove(meant)
            self.times.ends((history_id, meant), now_s)
        reported.ended = Wait(report.tool, now_s, tool_ended=True)
        return None if meant is None else max(0.0, now_s - meant.started_s)

    def meant(self, histories: Iterable[History], report: ToolReport) -> History:
        """Return the history that a client most likely means if it names only a conversation.

        That is one whose tool runs, if it is done; else an idle one whose last answer called it; of
        several the one used last.
        """
        return max(
            histories,
            key=lambda one: (
                report.ended and _find(self.running(one.id), report) is not None,
                not one.running and report.tool in (one.tool or "").split(","),
                one.last_used_s,
            ),
        )

    def wait(self, history_id: str, tool: str | None, idle_since_s: float) -> Wait:
        reported = self._reported.get(history_id)
        if reported is None:
            return Wait(tool, idle_since_s)
        if reported.running:
            newest = reported.running[-1]
            return Wait(newest.tool, max(idle_since_s, newest.started_s))
        assert reported.ended is not None
        ended = reported.ended
        return ended._replace(since_s=max(idle_since_s, ended.since_s))

    def turn_ended(self, history: History) -> None:
        """Note that the tool runs which an answer has called, unless its client says more."""
        if history.tool and history.id not in self._reported:
            self.times.begins(history.id, history.tool, history.last_used_s)

    def turn_came(self, history_id: str, came_s: float) -> None:
        """Note that the next turn has come, so the tool which the last answer called is done."""
        self.times.ends(history_id, came_s)

    def forget(self, history_id: str) -> None:
        self.times.drop(history_id)
        reported = self._reported.pop(history_id, None)
        for one in () if reported is None else reported.running:
            self.times.drop((history_id, one))


def _find(running: Iterable[Running], report: ToolReport) -> Running | None:
    for one in running:
        if one.tool == report.tool and report.call_id in (None, one.call_id):
            return one
    return None
