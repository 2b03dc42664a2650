"""Tenants' shares of a decoder's room: whose idle histories are paused for whose turns."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from conserve import identity
from conserve.admission import Admission, Admitted, Levels, Ticket, Window
from conserve.conversations import ConversationTable
from conserve.pausing import LEVEL_TOKENS, Pausing
from conserve.placement import CollocatedPlacement
from conserve.turn import TurnKey, TurnStats
from tests.unit.conserve.conversations.scene import a_table

APPENDED, OUTPUT = 300, 200


@dataclass
class Saturated:
    """One decoder, and conversations whose next turn comes as soon as the last one has ended.

    Attributes:
        tenants: each one's weight, and the lengths of its conversations in tokens.
        running: by history, its turn and how much of its prompt is computed for it.
    """

    capacity_tokens: int
    tenants: dict[str | None, tuple[int, list[int]]]
    seed: int = 0
    now_s: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple[TurnKey, int]] = field(default_factory=dict)
    served: Counter[str | None] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.table: ConversationTable = a_table(
            1, 0, self.capacity_tokens, CollocatedPlacement(), Pausing()
        )
        self.admission = Admission(self.table, 1024, 1e9, Levels())
        for tenant, (_, lengths) in self.tenants.items():
            for number, tokens in enumerate(lengths):
                self.tokens[identity.scoped(tenant, str(number))] = tokens
        for history_id in self.tokens:
            self.asks(history_id)

    def asks(self, history_id: str) -> None:
        known = self.table.begin(history_id, self.now_s)
        if known is not None:
            self.running[history_id] = known.newest_turn, APPENDED
            return
        weight, _ = self.tenants[identity.tenant_of(history_id)]
        tokens = self.tokens[history_id]
        self.has_room(self.admission.enter(history_id, tokens, self.now_s, weight=weight))

    def has_room(self, answer: object) -> None:
        if isinstance(answer, Admitted):
            self.running[answer.history.id] = answer.turn, answer.prompt_tokens

    def ends(self, history_id: str) -> None:
        turn, computed = self.running.pop(history_id)
        prompt = self.tokens[history_id] - OUTPUT
        stats = TurnStats(prompt, OUTPUT, max(0, prompt - computed), 0)
        assert self.table.advance(turn, "d1", stats, (), self.now_s)
        self.served[identity.tenant_of(history_id)] += stats.computed_tokens
        self.admission.queue.served(history_id, stats.computed_tokens)
        for admitted in self.admission.admit(self.now_s, history_id):
            self.has_room(admitted)

    def goes_on(self, turns: int) -> None:
        for _ in range(turns):
            self.now_s += self.rng.expovariate(40.0)
            history_id = self.rng.choice(sorted(self.running))
            self.ends(history_id)
            self.asks(history_id)

    def shares(self) -> dict[str | None, float]:
        return {one: self.served[one] / weight for one, (weight, _) in self.tenants.items()}

    @property
    def pauses(self) -> int:
        assert self.table.memory is not None
        return self.table.memory.pauses["room"]


@pytest.mark.parametrize("seed", range(9))
def test_tenants_that_always_ask_are_served_by_their_weights(seed: int) -> None:
    """There is room for four or so, and no history is idle but for the moment that a turn ends."""
    rng = random.Random(seed)
    a, b = 1 + seed % 3, 1 + seed // 3
    lengths = [[rng.randint(6_000, 12_000) for _ in range(n)] for n in (9, 5)]
    scene = Saturated(40_000, {"a": (a, lengths[0]), "b": (b, lengths[1])}, seed)
    scene.goes_on(300)
    for _ in range(300):
        scene.goes_on(5)
        shares = scene.shares()
        assert abs(shares["a"] - shares["b"]) <= 3 * 12_000 / min(a, b)
    # That is 3 % of it all. And they do not push each other out turn by turn.
    assert scene.pauses <= 1_800 / 10


def test_a_long_prompt_of_a_less_served_tenant_gets_the_room_of_several() -> None:
    """Each time a turn of the other tenant ends, that room is kept, until it is enough."""
    scene = Saturated(20_000, {"a": (1, [5_000] * 8), "b": (1, [9_000])})
    bound = 0
    for _ in range(300):
        scene.goes_on(5)
        history = scene.table.get(identity.scoped("b", "0"))
        bound += history is not None and history.home is not None
    assert bound > 290


def test_one_tenant_is_served_as_none() -> None:
    lengths = [4_000, 6_000, 8_000, 12_000, 15_000]
    one, none = (Saturated(30_000, {name: (1, lengths)}) for name in ("a", None))
    for scene in (one, none):
        scene.goes_on(1_000)
    assert one.pauses == none.pauses == 0
    assert one.served["a"] == none.served[None]


def test_a_tenant_that_had_room_for_itself_is_soon_beside_one_that_comes() -> None:
    """It was served a million tokens, of which the other may catch up few."""
    scene = Saturated(40_000, {"a": (1, [9_000] * 8), "b": (1, [])})
    scene.goes_on(2_000)
    was = scene.served["a"]
    assert was > 10**6
    for number in range(5):
        scene.tokens[identity.scoped("b", str(number))] = 9_000
        scene.asks(identity.scoped("b", str(number)))
    scene.goes_on(2_000)
    assert 0 < scene.served["b"] - (scene.served["a"] - was) < 65_536 + 2 * 9_000


def test_a_turn_that_finds_room_makes_no_lead_of_a_tenant_that_was_away() -> None:
    """Else the tenant had a claim to all that others were served meanwhile."""
    table = a_table(1, 0, 100_000, CollocatedPlacement(), Pausing())
    admission = Admission(table, 1024, 60.0, Levels())
    for tenant in ("busy", "rests"):
        admission.enter(identity.scoped(tenant, "c"), 1_000, 0.0)
    admission.queue.served(identity.scoped("busy", "c"), 10**9)
    admission.enter(identity.scoped("rests", "new"), 1_000, 1.0)
    leads = table.leads(identity.scoped("rests", "new"), 1_000)
    assert leads == {"busy": 65_536}
    assert table.leads(identity.scoped("busy", "c"), 1_000) == {"rests": -65_536}
    assert not table.leads(identity.scoped("rests", "new"), 65_536)
    assert LEVEL_TOKENS < 65_536


def a_led_admission(room: int, window: Window | None = None) -> tuple[ConversationTable, Admission]:
    """A tenant's two histories run turns; a turn of another, which was served less, waits."""
    table = a_table(1, 0, room, CollocatedPlacement(), Pausing())
    admission = Admission(table, 1024, 60.0, Levels(), window)
    for number in range(2):
        assert isinstance(admission.enter(f"busy\t{number}", 400, 0.0), Admitted)
    admission.queue.served("busy\t0", 20_000)
    assert isinstance(admission.enter("waits\tc", 400, 1.0), Ticket)
    assert admission.admit(2.0) == []
    return table, admission


def end_newest(table: ConversationTable, history_id: str) -> None:
    history = table.get(history_id)
    assert history is not None
    assert table.advance(history.newest_turn, "d1", TurnStats(400, 0, 0, 0), (), 3.0)


def test_a_history_gives_way_when_the_last_of_its_turns_has_ended() -> None:
    table, admission = a_led_admission(1_000)
    assert table.begin("busy\t0", 2.0) is not None
    end_newest(table, "busy\t0")
    assert admission.admit(3.0, "busy\t0") == []
    end_newest(table, "busy\t0")
    assert [one.history.id for one in admission.admit(3.0, "busy\t0")] == ["waits\tc"]
    # And does not come back at once.
    assert isinstance(admission.enter("busy\t0", 400, 3.0), Ticket)
    assert admission.admit(4.0) == []


def test_a_place_in_the_window_goes_to_who_was_served_less() -> None:
    window = Window()
    window.limit = 2
    table, admission = a_led_admission(10_000, window)
    end_newest(table, "busy\t0")
    assert [one.history.id for one in admission.admit(3.0, "busy\t0")] == ["waits\tc"]
    assert table.active(3.0) == 2
