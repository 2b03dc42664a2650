"""Agents come in a burst: the window shrinks if their tools slow each other down, and only then."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from conserve.admission import Admission, Ticket, Window, admission
from conserve.conversations import ConversationTable
from conserve.pausing import Pausing, ToolReport
from conserve.placement import ConversationPlacement
from conserve.turn import TurnKey, TurnStats

STEP_S = 0.5
TURN_S = 1.0
CALM_S = 120.0
CALM, BURST = 4, 40

Draw = Callable[[random.Random, float], tuple[str, float]]
"""Returns a tool's name and the work that it is, in seconds, at a time."""


def shell(rng: random.Random, now_s: float) -> tuple[str, float]:
    """Most commands take some seconds, some a minute."""
    return "bash", rng.lognormvariate(math.log(2.0), 1.2)


def search(rng: random.Random, now_s: float) -> tuple[str, float]:
    return "search", 2.0


def slow_search(rng: random.Random, now_s: float) -> tuple[str, float]:
    """A service that is ten times as slow from the burst on, whatever the load."""
    return "search", 2.0 if now_s < CALM_S else 20.0


def longer_work(rng: random.Random, now_s: float) -> tuple[str, float]:
    """Commands are longer from the burst on."""
    return "bash", rng.lognormvariate(math.log(2.0 if now_s < CALM_S else 12.0), 1.2)


def user(rng: random.Random, now_s: float) -> tuple[str, float]:
    """Short commands, and answers after which users think; in the burst ten times as long."""
    if rng.random() < 0.5:
        return "bash", 1.0
    return "", rng.lognormvariate(math.log(3.0 if now_s < CALM_S else 30.0), 1.2)


@dataclass
class Agent:
    name: str
    turns: int
    state: str = "comes"
    until_s: float = 0.0
    work_s: float = 0.0
    tool: str = ""
    turn: TurnKey | None = None


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for so long that it passes the window."""
    monkeypatch.setattr(admission, "patience_s", lambda timeout_s: 5 / 6 * timeout_s)


class Scene:
    """Agents that go from turns of a second to tools and back, with a table and its window.

    Args:
        cores: of the machine that their tools share; infinite if their tools are remote.
        reports: whether clients report their tools.
    """

    def __init__(
        self, draw: Draw, cores: float = math.inf, reports: bool = False, seed: int = 0
    ) -> None:
        self.draw, self.cores, self.reports = draw, cores, reports
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.table = ConversationTable(ConversationPlacement(), 1e6, pausing=Pausing())
        self.table.add_decoder("d", 100_000_000)
        self.window = Window()
        self.admission = Admission(self.table, 1024, 600, window=self.window)
        self.agents: dict[str, Agent] = {}
        self.number = 0
        self.limits: list[float] = []
        self.tools: list[int] = []

    def run(self, seconds: float, agents: int) -> None:
        """Go on with this number of agents: each that ends is replaced, unless there are more."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += STEP_S
            while len(self.agents) < agents:
                self.number += 1
                name = f"c{self.number}"
                self.agents[name] = Agent(name, 1 + self.rng.randrange(20))
            speed = min(1.0, self.cores / max(1, self.running))
            for one in list(self.agents.values()):
                self._step(one, speed, len(self.agents) > agents)
            self.admission.observe(self.now_s)
            for admitted in self.admission.admit(self.now_s):
                self._starts(self.agents[admitted.history.id], admitted.turn)
            self.limits.append(self.window.limit)
            self.tools.append(self.running)

    @property
    def running(self) -> int:
        return sum(one.state == "tool" and one.tool != "" for one in self.agents.values())

    @property
    def bounded_s(self) -> float:
        """How long there were more agents than the window admits."""
        return STEP_S * sum(limit < BURST for limit in self.limits)

    def _step(self, one: Agent, speed: float, too_many: bool) -> None:
        if one.state == "comes":
            if (history := self.table.begin(one.name, self.now_s)) is not None:
                self._starts(one, history.newest_turn)
                return
            one.state = "waits"
            entered = self.admission.enter(one.name, 100, self.now_s)
            if not isinstance(entered, Ticket):
                self._starts(one, entered.turn)
        elif one.state == "turn" and self.now_s >= one.until_s:
            self._calls(one, too_many)
        elif one.state == "tool":
            one.work_s -= STEP_S * (speed if one.tool else 1.0)
            if one.work_s <= 0:
                self._report(one, ended=True)
                one.state = "comes"

    def _starts(self, one: Agent, turn: TurnKey) -> None:
        one.state, one.turn, one.until_s = "turn", turn, self.now_s + TURN_S

    def _calls(self, one: Agent, too_many: bool) -> None:
        one.turns -= 1
        one.tool, one.work_s = self.draw(self.rng, self.now_s)
        is_last = not one.turns or too_many
        if is_last:
            # Its client leaves without a word. Some say by a call that they are done.
            one.tool = self.rng.choice(["", "submit"])
        one.state = "tool"
        assert one.turn is not None
        answer = TurnStats(100, 10, 0, 0, one.tool)
        assert self.table.advance(one.turn, "d", answer, (), self.now_s)
        if is_last:
            del self.agents[one.name]
        else:
            self._report(one)

    def _report(self, one: Agent, ended: bool = False) -> None:
        if self.reports and one.tool:
            self.table.tools.report(one.name, ToolReport(one.tool, "1", ended), self.now_s)


def burst(draw: Draw, minutes: float = 10, **options: float) -> Scene:
    scene = Scene(draw, **options)  # type: ignore[arg-type]
    scene.run(CALM_S, CALM)
    scene.run(60 * minutes, BURST)
    return scene


@pytest.mark.parametrize("reports", [False, True])
def test_tools_that_share_few_cores_shrink_the_window_until_fewer_run(reports: bool) -> None:
    scene = burst(shell, cores=6, reports=reports)
    at_first = scene.tools[int((CALM_S + 30) / STEP_S)]
    assert at_first > 30
    later = scene.tools[int((CALM_S + 300) / STEP_S) :]
    assert sum(later) / len(later) < 0.7 * at_first
    assert scene.window.limit < BURST
    # Nothing is too slow any more, so the bound is lifted.
    scene.run(600, CALM)
    assert scene.window.limit == math.inf


def test_the_window_holds_for_as_long_as_the_burst_does() -> None:
    scene = burst(shell, minutes=30, cores=6)
    assert scene.bounded_s > 0.9 * 1800


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draw", [shell, search, user], ids=lambda draw: draw.__name__)
def test_remote_tools_and_users_leave_the_window_alone(draw: Draw, seed: int) -> None:
    assert set(burst(draw, seed=seed).limits) == {math.inf}


@pytest.mark.parametrize("draw", [slow_search, longer_work], ids=lambda draw: draw.__name__)
def test_what_is_slow_however_many_run_is_usual_soon(draw: Draw) -> None:
    scene = burst(draw, minutes=25)
    assert scene.window.limit == math.inf
    assert scene.bounded_s < 20 * 60
