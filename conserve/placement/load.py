"""Follows engines' work, as far as it can be observed, for a policy that weighs it."""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from conserve.history import History, TurnStats
from conserve.placement.engine_costs import EngineCosts
from conserve.placement.handing_over import HandingOver, Price
from conserve.placement.state import Placement, Shared
from conserve.placement.step_costs import EngineStepCosts, Step, StepCosts

# Over so many seconds turns and prefills are averaged, and first prompts of the whole pool.
_LATE_S = 30.0
_DEMAND_S = 60.0
# Copies of what was handed over stay in a prefiller's cache for about so long.
_LENT_S = 10.0
# Prompts of which so much of the time is to be spent in line say nothing of their way.
_WAITS = 0.1
# So many prompts are remembered of which the first token has not come, the newest.
_MOST_PLACED = 1_024
# Engines' reports, one a second, are averaged over as long.
_SHARE = 1 / _LATE_S
# Of a turn: below that, what is held up is worked out by the first term of the series.
_HARDLY_ANY = 1e-4
# Histories that had no turn for so long are not about to send one.
_FORGOTTEN_S = 5 * _LATE_S
# A prompt's length, to tell seconds from tokens before any was computed.
_USUAL_TOKENS = 1_000


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """Tells of an engine's work, with each beat.

    Attributes:
        prefill_tokens: of the prompts that it has and has not computed yet, beyond what caches had.
        decodes: requests past their first token.
        step_s: how long an iteration without prefill has taken of late; 0: not known.
        prefill_tokens_per_s: how fast it has computed prompts of late, for people to read; 0: not
            known.
        kept_text_tokens, new_text_tokens: since its start, of prompts' text, what it had tokenized
            before and what not; 0 where it keeps nothing of that.
        steps: the iterations that it has taken since it spoke last, alike ones together.

    Example:
        >>> EngineLoad(prefill_tokens=1800, decodes=12, step_s=0.03).decodes
        12
    """

    prefill_tokens: int = 0
    decodes: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    kept_text_tokens: int = 0
    new_text_tokens: int = 0
    steps: tuple[Step, ...] = ()


class Work(NamedTuple):
    """An engine's work, as far as it is known at some time.

    Attributes:
        costs: how long work takes there.
        backlog_tokens, backlog_s: prefills sent there and not done, and how long they take.
        decodes: requests past their first token.
        step_s: how long an iteration without prefill takes.
        turns_per_s: turns that have come there to be answered, of late.
        conversations: those that are there yet and had one of late.
        own_share: of its time, what prefills for conversations of its own have taken of late.
        append_share: of that, what later turns have appended.
        lent_tokens: prefilled for other engines in the last ten seconds.
        lent_share: of its time, what that has taken of late.
        mean_decodes: how many requests were past their first token of late, on average.
        residual_s: how long the prefill that runs is to take yet, on average over time.
    """

    costs: EngineCosts
    backlog_tokens: float = 0.0
    backlog_s: float = 0.0
    decodes: int = 0
    step_s: float = 0.0
    turns_per_s: float = 0.0
    own_share: float = 0.0
    append_share: float = 0.0
    lent_tokens: int = 0
    conversations: int = 0
    lent_share: float = 0.0
    mean_decodes: float = 0.0
    residual_s: float = 0.0

    def coming_wait_s(self, held_up_s: float) -> float:
        """Return what turns that come meanwhile wait in all, if the engine is held up for so long.

        They come as often as of late. But a conversation sends its next turn when it has the last
        answer, so each that is there is held up once: if it sends turns at a rate r, for ``t - (1 -
        exp(-r t)) / r`` of the time t on average.
        """
        if not self.conversations or not self.turns_per_s:
            return 0.0
        rate_per_s = self.turns_per_s / self.conversations
        if rate_per_s * held_up_s < _HARDLY_ANY:
            return self.turns_per_s * held_up_s * held_up_s / 2
        return self.conversations * (held_up_s + math.expm1(-rate_per_s * held_up_s) / rate_per_s)

    def prefill_wait_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Until a prefill that comes there now is done, in seconds."""
        costs = self.costs
        own_s = costs.prefill_s(new_tokens, cached_tokens)
        if not self.decodes:
            return self.backlog_s + own_s + costs.prefill_constant_s
        chunks = math.ceil((self.backlog_tokens + new_tokens) / costs.chunk_tokens)
        return costs.prefill_share * (self.backlog_s + own_s) + chunks * self.step_s


class _Placed(NamedTuple):
    """A prompt whose first token has not come.

    Attributes:
        moves_tokens: what is handed over of it, or would be.
    """

    at_s: float
    estimated_s: float
    moves_tokens: int
    handed_over: bool


class Loads:
    """Knows all engines' work: what they say, and what was sent to them since.

    Engines speak every second. A prompt sent since then counts until it is reported done, and what
    waits grows shorter as time passes, at the engine's own pace. So an engine's word a second old
    is nearly as good as a new one. Older words, or none, are no error: what was sent then counts
    for as long as it should take. A prompt that is on its way while its engine speaks is not
    counted for the second until it speaks again.

    Of prompts that find no line it is kept in mind how long they should take until their first
    token, and learned what those that are handed over take beyond that (`HandingOver`).

    What work costs is learned from the iterations that engines tell of (`StepCosts`), by engines
    of the same kind together.

    Args:
        prior: what work is expected to cost before anything was seen; None: nothing is known.

    Example:
        >>> loads = Loads(EngineCosts(per_token_s=0.0005))
        >>> loads.says("p1", EngineLoad(prefill_tokens=5000), now_s=10)
        >>> loads.placed("c", 1000, Placement("d1", "p1"), Shared({}), now_s=10.5)
        >>> loads.work("p1", now_s=11.0).backlog_s
        2.0
    """

    def __init__(self, prior: EngineCosts | None = None) -> None:
        self._prior = prior or EngineCosts.assumed()
        self._kinds: dict[str, _Kind] = {}
        self._engines: dict[str, _Engine] = {}
        self._demand = _Late(_DEMAND_S)
        self._residuals = _Late(_DEMAND_S)
        self._placed: dict[str, _Placed] = {}
        self._handing_over = HandingOver()

    def joined(self, engine_id: str, kind: str, handoffs: Sequence[tuple[int, float]] = ()) -> None:
        """An engine is ready.

        Args:
            kind: engines of one kind do the same work in the same time: same hardware, same model,
                same arguments.
            handoffs: tokens, and the seconds by which a prompt of so many took longer when it was
                handed over than when it was computed here, as tried at its start. Engines start
                side by side and disturb each other, so of those of a kind the least counts: what
                handing over costs beyond that is learned from turns, while nothing corrects a price
                at which nobody hands over.
        """
        known = self._engines.get(engine_id)
        if known is None or known.kind.name != kind:
            self._engines[engine_id] = known = self._new_engine(kind)
        known.kind.tried(handoffs)
        for engine in self._engines.values():
            engine.learn(())

    def says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        """An engine says what it does."""
        engine = self._of(engine_id)
        engine.learn(load.steps)
        engine.load = load
        backlog_s = load.prefill_tokens * engine.token_s(now_s)
        engine.queue.set(load.prefill_tokens, backlog_s, now_s)
        engine.mean_decodes += _SHARE * (load.decodes - engine.mean_decodes)

    def placed(
        self, history_id: str, tokens: int, placement: Placement, shared: Shared, now_s: float
    ) -> None:
        """A prompt goes where it was placed."""
        home = self._of(placement.decoder_id)
        home.turns.add(history_id, now_s)
        where = placement.prefiller_id
        if where is None:
            engine, past = home, shared.found(placement.decoder_id)
        else:
            engine, past = self._of(where), shared.there(where)
            engine.lent.append((now_s, tokens))
        past = min(past, tokens - 1)
        there = shared.there(placement.decoder_id)
        self._expect(history_id, tokens, past, there, placement, now_s)
        seconds = engine.prefills(tokens - past, past, now_s)
        engine.queue.add(history_id, tokens - past, seconds, now_s)
        (home.first_prompts if where is None else engine.lending).add(seconds, now_s)
        self._demand.add(seconds, now_s)
        self._residuals.add(seconds * seconds / 2, now_s)

    def appended(
        self,
        history_id: str,
        new_tokens: int,
        cached_tokens: int,
        engine_id: str,
        now_s: float,
        *,
        lent: bool,
    ) -> None:
        """Note that what a later turn appends goes to an engine, where its length is known.

        Args:
            new_tokens: what is computed there.
            cached_tokens: what is found there, or comes from host memory.
            lent: whether it is computed for another engine.
        """
        engine = self._of(engine_id)
        if lent:
            engine.lent.append((now_s, new_tokens + cached_tokens))
            seconds = engine.prefills(new_tokens, cached_tokens, now_s)
            engine.lending.add(seconds, now_s)
            self._demand.add(seconds, now_s)
            self._residuals.add(seconds * seconds / 2, now_s)
        else:
            # It counts among what the engine has computed when that is known.
            seconds = engine.costs.prefill_s(new_tokens, cached_tokens)
        engine.queue.add(history_id, new_tokens, seconds, now_s)

    def turn_came(self, history_id: str, engine_id: str, now_s: float) -> None:
        """A later turn goes to its engine; what it adds is not known yet."""
        self._of(engine_id).turns.add(history_id, now_s)

    def left(self, history_id: str, engine_id: str) -> None:
        """A history has ended, or is bound there no more: no turn of it comes there.

        Those that came count as before: where some end, others begin.
        """
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.turns.drop(history_id)

    def turn_ended(self, history: History, stats: TurnStats | None, now_s: float) -> None:
        """A turn of a history is over, and so is its prefill.

        Args:
            stats: what its engine did; None if that is not known.
        """
        placed = self._placed.pop(history.id, None)
        if history.decoder_id is None:
            return
        if stats is not None and placed is not None:
            self._first_token_came(placed, stats, now_s)
        if stats is not None and not history.promised:
            cached_tokens = stats.found_tokens
            new_tokens = max(0, stats.prompt_tokens - cached_tokens)
            self.computed(history.decoder_id, new_tokens, cached_tokens, now_s)
        self.done(history.decoder_id, history.id)

    def computed(self, engine_id: str, tokens: int, cached_tokens: int, now_s: float) -> None:
        """An engine has computed what a later turn has added."""
        engine = self._of(engine_id)
        engine.appends.add(engine.prefills(tokens, cached_tokens, now_s), now_s)

    def done(self, engine_id: str, history_id: str) -> None:
        """The prefill of a history that was placed is over there, if it is not known yet."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.queue.drop(history_id)

    def gone(self, engine_id: str) -> None:
        """An engine is lost, or has left."""
        self._engines.pop(engine_id, None)

    def work(self, engine_id: str, now_s: float) -> Work:
        """An engine's work at this time."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return Work(self._prior)
        tokens, seconds = engine.queue.left(now_s)
        return Work(
            engine.costs,
            tokens,
            seconds,
            engine.load.decodes,
            engine.load.step_s or engine.costs.decode_s(engine.load.decodes),
            engine.turns.per_s(now_s),
            min(1.0, engine.first_prompts.per_s(now_s) + engine.appends.per_s(now_s)),
            min(1.0, engine.appends.per_s(now_s)),
            engine.lent_tokens(now_s),
            engine.turns.histories(now_s),
            min(1.0, engine.lending.per_s(now_s)),
            engine.mean_decodes,
            engine.residuals.per_s(now_s),
        )

    def price(self) -> Price:
        """Return what it takes to hand a prompt over, beyond what is estimated."""
        return self._handing_over.price()

    def demand(self, prefillers: int, now_s: float) -> float:
        """Return the share of so many prefillers' time that first prompts ask for, wherever they
        run.
        """
        return self._demand.per_s(now_s) / max(1, prefillers)

    def residual_s(self, prefillers: int, now_s: float) -> float:
        """How long a first prompt that runs is to take yet, on average, if so many run all."""
        return self._residuals.per_s(now_s) / max(1, prefillers)

    def _expect(
        self,
        history_id: str,
        tokens: int,
        past: int,
        there: int,
        placement: Placement,
        now_s: float,
    ) -> None:
        """Keep in mind how long a prompt that is placed now should take.

        Args:
            past: what of it is not computed.
            there: what of it its home has.
        """
        where = placement.prefiller_id
        home = self.work(placement.decoder_id, now_s)
        engine = home if where is None else self.work(where, now_s)
        comes_tokens = past - there if where is None else tokens - there
        seconds = home.costs.handoff_s(comes_tokens) + engine.prefill_wait_s(tokens - past, past)
        self._placed.pop(history_id, None)
        if engine.backlog_s > _WAITS * seconds:
            # It would say how well a line's length is known.
            return
        self._placed[history_id] = _Placed(now_s, seconds, tokens - there, where is not None)
        if len(self._placed) > _MOST_PLACED:
            del self._placed[next(iter(self._placed))]

    def _first_token_came(self, placed: _Placed, stats: TurnStats, now_s: float) -> None:
        # What should have been handed over, and was not, was computed twice: that is no price.
        arrived = stats.lmcache_tokens > 0 or not placed.handed_over
        if stats.decode_s is not None and arrived:
            seconds = now_s - stats.decode_s - placed.at_s
            self._handing_over.took(
                seconds,
                placed.estimated_s,
                placed.moves_tokens,
                handed_over=placed.handed_over,
            )

    def _of(self, engine_id: str) -> "_Engine":
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = self._engines[engine_id] = self._new_engine("")
        return engine

    def _new_engine(self, kind: str) -> "_Engine":
        if kind not in self._kinds:
            self._kinds[kind] = _Kind(kind, self._prior)
        return _Engine(self._kinds[kind])


def _line_through(handoffs: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Seconds for any, and for each token, neither below 0; None without points."""
    if not handoffs:
        return None
    n = len(handoffs)
    mean_tokens = sum(tokens for tokens, _ in handoffs) / n
    mean_s = sum(seconds for _, seconds in handoffs) / n
    square = sum((tokens - mean_tokens) ** 2 for tokens, _ in handoffs)
    product = sum((tokens - mean_tokens) * (s - mean_s) for tokens, s in handoffs)
    per_token_s = max(0.0, product / square) if square else 0.0
    constant_s = max(0.0, mean_s - per_token_s * mean_tokens)
    return constant_s, per_token_s


class _Late:
    """A sum that decays: what came of late."""

    __slots__ = ("_at_s", "_over_s", "_sum")

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._sum = 0.0
        self._at_s = -math.inf

    def add(self, amount: float, now_s: float) -> None:
        self._decay(now_s)
        self._sum += amount

    def per_s(self, now_s: float) -> float:
        """How much in a second."""
        self._decay(now_s)
        return self._sum / self._over_s

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            self._sum *= math.exp((self._at_s - now_s) / self._over_s)
            self._at_s = now_s


class _Turns:
    """Turns that came of late, and whose."""

    __slots__ = ("_all", "_last_s")

    def __init__(self) -> None:
        self._all = _Late(_LATE_S)
        # Of histories that are there yet, when their last turn came; the latest is last.
        self._last_s: dict[str, float] = {}

    def add(self, history_id: str, now_s: float) -> None:
        self._last_s.pop(history_id, None)
        self._last_s[history_id] = now_s
        self._all.add(1.0, now_s)

    def drop(self, history_id: str) -> None:
        self._last_s.pop(history_id, None)

    def per_s(self, now_s: float) -> float:
        """How many in a second."""
        return self._all.per_s(now_s)

    def histories(self, now_s: float) -> int:
        """How many histories that are there yet had one."""
        while self._last_s:
            history_id = next(iter(self._last_s))
            if self._last_s[history_id] > now_s - _FORGOTTEN_S:
                break
            del self._last_s[history_id]
        return len(self._last_s)


class _Queue:
    """Prefills that wait, first come first served, and get shorter as time passes.

    What their engine has said is the first of them, under the key None.
    """

    __slots__ = ("_at_s", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, float]] = {}
        self._at_s = -math.inf

    def set(self, tokens: float, seconds: float, now_s: float) -> None:
        self._waiting = {None: (tokens, seconds)}
        self._at_s = now_s

    def add(self, key: Hashable, tokens: float, seconds: float, now_s: float) -> None:
        self._pass(now_s)
        self._waiting[key] = tokens, seconds

    def drop(self, key: Hashable) -> None:
        self._waiting.pop(key, None)

    def left(self, now_s: float) -> tuple[float, float]:
        """Tokens and seconds."""
        self._pass(now_s)
        tokens = seconds = 0.0
        for each_tokens, each_s in self._waiting.values():
            tokens += each_tokens
            seconds += each_s
        return tokens, seconds

    def _pass(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        self._at_s = max(self._at_s, now_s)
        while self._waiting and passed_s > 0:
            key, (tokens, seconds) = next(iter(self._waiting.items()))
            if seconds > passed_s:
                left = 1 - passed_s / seconds
                self._waiting[key] = tokens * left, seconds * left
                return
            passed_s -= seconds
            del self._waiting[key]


class _Kind:
    """Knows what engines have in common that do the same work in the same time.

    Attributes:
        handoff: seconds for any handoff, and for each token, as tried; None: nobody has.
    """

    __slots__ = ("_tried", "handoff", "name", "steps")

    def __init__(self, name: str, prior: EngineCosts) -> None:
        self.name = name
        self.steps = StepCosts(prior)
        self._tried: dict[int, float] = {}
        self.handoff: tuple[float, float] | None = None

    def tried(self, handoffs: Iterable[tuple[int, float]]) -> None:
        """One of them has tried what prompts of so many tokens take beyond computing them."""
        for tokens, seconds in handoffs:
            self._tried[tokens] = min(seconds, self._tried.get(tokens, math.inf))
        self.handoff = _line_through(list(self._tried.items()))


class _Engine:
    """One engine's."""

    __slots__ = (
        "_model", "_seconds", "_started", "_tokens", "appends", "costs", "first_prompts", "kind",
        "lending", "lent", "load", "mean_decodes", "queue", "residuals", "turns",
    )  # fmt: skip

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self._model = EngineStepCosts(kind.steps)
        self._started = False
        self.costs = self._model.costs()
        self.load = EngineLoad()
        self.mean_decodes = 0.0
        self.queue = _Queue()
        self.turns = _Turns()
        # What prefills take, for its own conversations and for other engines.
        self.first_prompts = _Late(_LATE_S)
        self.appends = _Late(_LATE_S)
        self.lending = _Late(_LATE_S)
        self.lent: deque[tuple[float, int]] = deque()
        self.residuals = _Late(_LATE_S)
        self._seconds = _Late(_LATE_S)
        self._tokens = _Late(_LATE_S)

    def learn(self, steps: Sequence[Step]) -> None:
        """It has taken these iterations."""
        for step in steps:
            if self._started:
                self._model.add(step)
            else:
                self._model.add_start(step)
        # Its first report with any has those of its start.
        self._started |= bool(steps)
        self.costs = self._model.costs()
        if self.kind.handoff is not None:
            constant_s, per_token_s = self.kind.handoff
            self.costs = replace(
                self.costs, handoff_constant_s=constant_s, handoff_per_token_s=per_token_s
            )

    def prefills(self, tokens: int, cached_tokens: int, now_s: float) -> float:
        """It computes so much; how long that takes."""
        seconds = self.costs.prefill_s(tokens, cached_tokens)
        self._seconds.add(seconds, now_s)
        self._tokens.add(tokens, now_s)
        self.residuals.add(seconds * seconds / 2, now_s)
        return seconds

    def token_s(self, now_s: float) -> float:
        """How long a token takes of prompts such as have come of late."""
        tokens = self._tokens.per_s(now_s)
        if tokens < 1.0:
            return self.costs.prefill_s(_USUAL_TOKENS) / _USUAL_TOKENS
        return self._seconds.per_s(now_s) / tokens

    def lent_tokens(self, now_s: float) -> int:
        lent = self.lent
        while lent and lent[0][0] < now_s - _LENT_S:
            lent.popleft()
        return sum(tokens for _, tokens in lent)
