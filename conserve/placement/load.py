"""Follows engines' work, as far as it can be observed, for a policy that weighs it."""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, linear_regression
from typing import NamedTuple

import msgspec

from conserve.hints import BACKGROUND
from conserve.history import History
from conserve.placement.engine_costs import EngineCosts, EngineStepCosts, Step, StepCosts
from conserve.placement.state import Placement, Shared
from conserve.turn import TurnStats

# Turns and prefills are averaged over the first, first prompts of the whole pool over the second.
_LATE_S = 30.0
_DEMAND_S = 60.0
# Copies of what was handed over stay in a prefiller's cache for about this long.
_LENT_S = 10.0
# Engines' reports, one a second, are averaged over as long.
_SHARE = 1 / _LATE_S
# Below this many turns, a wait is computed by the first term of its series.
_HARDLY_ANY = 1e-4
# Histories that had no turn for this long are not expected to send one.
_FORGOTTEN_S = 5 * _LATE_S
# A sum that has decayed to less than this is none.
_NOTHING = 1e-9
# What an adapter's load counts in the mean of all.
_NEWEST_LOAD = 0.25
# A prompt's length, to tell seconds from tokens before any was computed.
_USUAL_TOKENS = 1_000


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """An engine's work, as it reports it with each beat.

    Attributes:
        prefill_tokens: of its prompts, what it has not computed yet, beyond what caches had.
        encode_tokens: embeddings of these prompts' images that its node did not have.
        decodes: requests past their first token.
        step_s, prefill_tokens_per_s: of recent iterations; 0 if not known.
        kept_text_tokens, new_text_tokens: of prompts' text, what it had tokenized before and what
            not.
        steps: the iterations since its last report, alike ones together.
        overdue_loads: loads of KV that took too long, and for which LMCache's server was killed.
        adapters: ids of the adapters that it has.
        adapter_loads_s: how long those took that it has loaded since its last report.
    """

    prefill_tokens: int = 0
    decodes: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    kept_text_tokens: int = 0
    new_text_tokens: int = 0
    encode_tokens: int = 0
    steps: tuple[Step, ...] = ()
    overdue_loads: int = 0
    adapters: tuple[str, ...] = ()
    adapter_loads_s: tuple[float, ...] = ()


def wait_s(held_up_s: float, turns_per_s: float) -> float:
    """Return how long a conversation waits on average if its engine is held up.

    Its turns come at a rate r, but no further one while one waits. So it waits for ``t - (1 -
    exp(-r t)) / r`` of the time t.
    """
    turns = turns_per_s * held_up_s
    if turns < _HARDLY_ANY:
        return turns * held_up_s / 2
    return held_up_s + math.expm1(-turns) / turns_per_s


class Work(NamedTuple):
    """An engine's work; rates, shares and means are of about the last 30 seconds.

    Attributes:
        backlog_tokens, backlog_s: prefills sent there and not done, and how long they take.
        decodes: requests past their first token.
        append_share: of its time, what later turns of its own conversations append.
        append_s: the time of the append that runs at an average moment at which one runs.
        coming: prompts that were sent there since its last report, and are not done.
        background_share: of its conversations, those whose turns wait for others'.
        adapter_s: how long it takes to load the adapter of a turn; 0 if it has that, or needs none.
        lent_tokens: prefilled for other engines in the last ten seconds.
        conversations: those that are there yet and had a turn lately.
        ages_s: how long ago these began, together.
    """

    costs: EngineCosts
    backlog_tokens: float = 0.0
    backlog_s: float = 0.0
    decodes: int = 0
    step_s: float = 0.0
    turns_per_s: float = 0.0
    append_share: float = 0.0
    append_s: float = 0.0
    lent_tokens: int = 0
    conversations: int = 0
    mean_decodes: float = 0.0
    ages_s: float = 0.0
    coming: int = 0
    background_share: float = 0.0
    adapter_s: float = 0.0

    @property
    def weight(self) -> float:
        """Return what a second counts for which turns there are delayed."""
        return 1 - (1 - BACKGROUND) * self.background_share

    def coming_wait_s(self, held_up_s: float) -> float:
        """Return the total wait of turns that come while the engine is held up."""
        if not self.conversations:
            return 0.0
        return self.conversations * wait_s(held_up_s, self.turns_per_s / self.conversations)

    def prefill_wait_s(self, new_tokens: int, cached_tokens: int, encode_tokens: int = 0) -> float:
        costs = self.costs
        own_s = costs.prefill_s(new_tokens, cached_tokens)
        encode_s = costs.encode_s(min(encode_tokens, new_tokens))
        if not self.decodes:
            return self.backlog_s + own_s + encode_s + costs.prefill_constant_s
        chunks = math.ceil((self.backlog_tokens + new_tokens) / costs.chunk_tokens)
        return costs.prefill_share * (self.backlog_s + own_s) + encode_s + chunks * self.step_s


class FirstPrompts(NamedTuple):
    """Describes first prompts of about the last minute, wherever they are computed.

    Attributes:
        per_s: how many there are a second.
        engines: how many engines' whole time they ask for.
        tokens, seconds: of the prompt that is running at an average moment at which one runs.
    """

    per_s: float = 0.0
    engines: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


class Loads:
    """Knows all engines' work: what they report, and what was sent to them since.

    A prompt sent since an engine's last report counts until it is reported done, and the backlog
    shrinks with time at the engine's own pace. So old reports, or none, are no error. Costs are
    learned from engines' iterations, for each kind together (`StepCosts`).
    """

    def __init__(self, prior: EngineCosts | None = None) -> None:
        self._prior = prior or EngineCosts.assumed()
        self._kinds: dict[str, _Kind] = {}
        self._engines: dict[str, _Engine] = {}
        self._first_prompts = _Spent(_DEMAND_S)
        # Their number, and their tokens, each times its prompt's seconds.
        self._prompts, self._token_seconds = _Late(_DEMAND_S), _Late(_DEMAND_S)

    def joined(self, engine_id: str, kind: str, handoffs: Sequence[tuple[int, float]] = ()) -> None:
        """Add an engine; those of one ``kind`` have the same hardware, model and arguments.

        Args:
            handoffs: tokens, and the seconds by which such a prompt took longer when handed over
                than when computed, as tried at its start. The least of a kind counts: engines that
                start together disturb each other.
        """
        known = self._engines.get(engine_id)
        if known is None or known.kind.name != kind:
            self._engines[engine_id] = known = self._new_engine(kind)
        known.kind.tried(handoffs)
        for engine in self._engines.values():
            engine.learn(())

    def says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        engine = self._of(engine_id)
        engine.learn(load.steps)
        for took_s in load.adapter_loads_s:
            known_s = engine.kind.adapter_s
            engine.kind.adapter_s += (took_s - known_s) * (_NEWEST_LOAD if known_s else 1.0)
        engine.load = load
        backlog_s = load.prefill_tokens * engine.token_s(now_s)
        backlog_s += engine.costs.encode_s(load.encode_tokens)
        engine.queue.set(load.prefill_tokens, backlog_s, now_s)
        engine.mean_decodes += _SHARE * (load.decodes - engine.mean_decodes)

    def placed(
        self, history_id: str, tokens: int, placement: Placement, shared: Shared, now_s: float
    ) -> None:
        home = self._of(placement.decoder_id)
        home.turns.add(history_id, now_s, shared.background)
        where = placement.prefiller_id
        if where is None:
            engine, past = home, shared.found(placement.decoder_id)
            if placement.after is not None:
                past = placement.after.tokens
        else:
            engine, past = self._of(where), shared.there(where)
            engine.lent.append((now_s, tokens))
        past = min(past, tokens - 1)
        seconds = engine.prefills(tokens - past, past, now_s)
        seconds += engine.costs.encode_s(min(shared.encode_tokens, tokens - past))
        engine.queue.add(history_id, tokens - past, seconds, now_s)
        self._prompts.add(1.0, now_s)
        self._first_prompts.add(seconds, now_s)
        self._token_seconds.add(tokens * seconds, now_s)

    def appended(
        self, history: History, prompt_tokens: int, now_s: float, encode_tokens: int
    ) -> None:
        """Add what a later turn appends; `computed` counts it when it is done."""
        cached_tokens = min(history.held_tokens, prompt_tokens - 1)
        new_tokens = prompt_tokens - cached_tokens
        costs = self._of(history.home or "").costs
        seconds = costs.encode_s(min(encode_tokens, new_tokens))
        seconds += costs.prefill_s(new_tokens, cached_tokens)
        self._of(history.home or "").queue.add(history.id, new_tokens, seconds, now_s)

    def turn_came(
        self, history_id: str, engine_id: str, now_s: float, background: bool = False
    ) -> None:
        self._of(engine_id).turns.add(history_id, now_s, background)

    def left(self, history_id: str, engine_id: str) -> None:
        """Expect no more turns of a history; those that came still count in the rate."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.turns.drop(history_id)

    def turn_ended(self, history: History, stats: TurnStats | None, now_s: float) -> None:
        """Note that a turn, and its prefill, is over; ``stats`` is None if unknown."""
        if history.home is None:
            return
        if stats is not None and not history.promised:
            cached_tokens = stats.found_tokens
            new_tokens = max(0, stats.prompt_tokens - cached_tokens)
            self.computed(history.home, new_tokens, cached_tokens, now_s, stats.encoded_tokens)
        self.done(history.home, history.id)

    def computed(
        self, engine_id: str, tokens: int, cached_tokens: int, now_s: float, encoded_tokens: int = 0
    ) -> None:
        engine = self._of(engine_id)
        seconds = engine.prefills(tokens, cached_tokens, now_s)
        engine.appends.add(seconds + engine.costs.encode_s(encoded_tokens), now_s)

    def done(self, engine_id: str, history_id: str) -> None:
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.queue.drop(history_id)

    def gone(self, engine_id: str) -> None:
        self._engines.pop(engine_id, None)

    def work(self, engine_id: str, now_s: float, adapter: str = "") -> Work:
        """Return an engine's work; ``adapter`` is the id of a turn's."""
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
            min(1.0, engine.appends.share(now_s)),
            engine.appends.running_s(now_s),
            engine.lent_tokens(now_s),
            engine.turns.histories(now_s),
            engine.mean_decodes,
            engine.turns.ages_s(now_s),
            len(engine.queue),
            engine.turns.background_share,
            0.0 if not adapter or adapter in engine.load.adapters else engine.kind.adapter_s,
        )

    def done_in_s(self, engine_id: str, history_id: str, now_s: float) -> float:
        """Return when the prefill of a history is done that was sent to an engine."""
        return self._of(engine_id).queue.until_s(history_id, now_s)

    def first_prompts(self, now_s: float) -> FirstPrompts:
        engines = self._first_prompts.share(now_s)
        if not engines:
            return FirstPrompts()
        tokens = int(self._token_seconds.per_s(now_s) / engines)
        seconds = self._first_prompts.running_s(now_s)
        return FirstPrompts(self._prompts.per_s(now_s), engines, tokens, seconds)

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
    if not handoffs:
        return None
    tokens, seconds = zip(*handoffs, strict=True)
    slope_s = linear_regression(tokens, seconds).slope if len(set(tokens)) > 1 else 0.0
    per_token_s = max(0.0, slope_s)
    return max(0.0, fmean(seconds) - per_token_s * fmean(tokens)), per_token_s


class _Late:
    __slots__ = ("_at_s", "_over_s", "_sum")

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._sum = 0.0
        self._at_s = -math.inf

    def add(self, amount: float, now_s: float) -> None:
        self._decay(now_s)
        self._sum += amount

    def per_s(self, now_s: float) -> float:
        self._decay(now_s)
        return self._sum / self._over_s

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            self._sum *= math.exp((self._at_s - now_s) / self._over_s)
            if self._sum < _NOTHING:
                # Ratios of sums that have nearly vanished would mean nothing.
                self._sum = 0.0
            self._at_s = now_s


class _Spent:
    """The time that prefills took of late."""

    __slots__ = ("_seconds", "_squares")

    def __init__(self, over_s: float) -> None:
        self._seconds, self._squares = _Late(over_s), _Late(over_s)

    def add(self, seconds: float, now_s: float) -> None:
        self._seconds.add(seconds, now_s)
        self._squares.add(seconds * seconds, now_s)

    def share(self, now_s: float) -> float:
        return self._seconds.per_s(now_s)

    def running_s(self, now_s: float) -> float:
        """Return how long the prefill takes that runs at an average moment, if one does."""
        share = self.share(now_s)
        return self._squares.per_s(now_s) / share if share else 0.0


class _Turns:
    __slots__ = ("_all", "_background", "_begun_s", "_since")

    def __init__(self) -> None:
        self._all = _Late(_LATE_S)
        # When the first and the last turn came of each history that is there yet; the latest last.
        self._since: dict[str, tuple[float, float]] = {}
        # The first turns' times, together.
        self._begun_s = 0.0
        self._background: set[str] = set()

    def add(self, history_id: str, now_s: float, background: bool = False) -> None:
        if background:
            self._background.add(history_id)
        known = self._since.pop(history_id, None)
        if known is None:
            self._begun_s += now_s
        self._since[history_id] = now_s if known is None else known[0], now_s
        self._all.add(1.0, now_s)

    def drop(self, history_id: str) -> None:
        known = self._since.pop(history_id, None)
        self._background.discard(history_id)
        if known is not None:
            # Of none that is left, the sum is exact.
            self._begun_s = self._begun_s - known[0] if self._since else 0.0

    @property
    def background_share(self) -> float:
        return len(self._background) / max(1, len(self._since))

    def per_s(self, now_s: float) -> float:
        return self._all.per_s(now_s)

    def ages_s(self, now_s: float) -> float:
        return max(0.0, len(self._since) * now_s - self._begun_s)

    def histories(self, now_s: float) -> int:
        while self._since:
            history_id = next(iter(self._since))
            if self._since[history_id][1] > now_s - _FORGOTTEN_S:
                break
            self.drop(history_id)
        return len(self._since)


class _Queue:
    """Prefills that wait, in order; None is the key of what the engine itself has reported."""

    __slots__ = ("_at_s", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, float]] = {}
        self._at_s = -math.inf

    def __len__(self) -> int:
        """Return how many were added since the engine's report, and are not done."""
        return len(self._waiting) - (None in self._waiting)

    def set(self, tokens: float, seconds: float, now_s: float) -> None:
        self._waiting = {None: (tokens, seconds)}
        self._at_s = now_s

    def add(self, key: Hashable, tokens: float, seconds: float, now_s: float) -> None:
        self._pass(now_s)
        self._waiting[key] = tokens, seconds

    def drop(self, key: Hashable) -> None:
        self._waiting.pop(key, None)

    def left(self, now_s: float) -> tuple[float, float]:
        self._pass(now_s)
        tokens = seconds = 0.0
        for each_tokens, each_s in self._waiting.values():
            tokens += each_tokens
            seconds += each_s
        return tokens, seconds

    def until_s(self, key: Hashable, now_s: float) -> float:
        """Return when one is done. The engine may have reported it with all others."""
        self._pass(now_s)
        seconds = 0.0
        for other, (_, each_s) in self._waiting.items():
            seconds += each_s
            if other == key or (other is None and key not in self._waiting):
                break
        return seconds

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
    """Knowledge about engines that do the same work in the same time."""

    __slots__ = ("_tried", "adapter_s", "handoff", "name", "steps")

    def __init__(self, name: str, prior: EngineCosts) -> None:
        self.name = name
        # Nothing is assumed of adapters before one was loaded.
        self.adapter_s = 0.0
        self.steps = StepCosts(prior)
        self._tried: dict[int, float] = {}
        self.handoff: tuple[float, float] | None = None

    def tried(self, handoffs: Iterable[tuple[int, float]]) -> None:
        for tokens, seconds in handoffs:
            self._tried[tokens] = min(seconds, self._tried.get(tokens, math.inf))
        self.handoff = _line_through(list(self._tried.items()))


class _Engine:
    __slots__ = (
        "_model", "_seconds", "_started", "_tokens", "appends", "costs", "kind", "lent", "load",
        "mean_decodes", "queue", "turns",
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
        self.appends = _Spent(_LATE_S)
        self.lent: deque[tuple[float, int]] = deque()
        self._seconds = _Late(_LATE_S)
        self._tokens = _Late(_LATE_S)

    def learn(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._model.add(step, starts=not self._started)
        # The first report with steps has those of its start.
        self._started |= bool(steps)
        self.costs = self._model.costs()
        if self.kind.handoff is not None:
            constant_s, per_token_s = self.kind.handoff
            self.costs = replace(
                self.costs, handoff_constant_s=constant_s, handoff_per_token_s=per_token_s
            )

    def prefills(self, tokens: int, cached_tokens: int, now_s: float) -> float:
        seconds = self.costs.prefill_s(tokens, cached_tokens)
        self._seconds.add(seconds, now_s)
        self._tokens.add(tokens, now_s)
        return seconds

    def token_s(self, now_s: float) -> float:
        """Return the seconds that a token of recent prompts takes."""
        tokens = self._tokens.per_s(now_s)
        if tokens < 1.0:
            return self.costs.prefill_s(_USUAL_TOKENS) / _USUAL_TOKENS
        return self._seconds.per_s(now_s) / tokens

    def lent_tokens(self, now_s: float) -> int:
        lent = self.lent
        while lent and lent[0][0] < now_s - _LENT_S:
            lent.popleft()
        return sum(tokens for _, tokens in lent)
