"""Several models on one cluster's GPUs, each with engines that come and go with its load.

Each model has a table, policies and an autoscaler of its own, which are the live system's classes;
once a second each hears what the others lack, as routers tell it there. Engines start where a GPU
is free, and take some time for it. They do not fail.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autoscale.autoscaler import Others, make_autoscaler
from conserve.admission import Admitted
from conserve.settings import Settings
from conserve.wire import NO_LACK, Lack
from conserve_lab.metrics import Result, Tally
from conserve_lab.records import Script, TurnRecord
from conserve_lab.simulate.clients import Open
from conserve_lab.simulate.cluster import Cluster
from conserve_lab.simulate.system import SimulationError, System


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its system has as many decoders as its settings' `replicas`, and no prefillers.

    Attributes:
        settings: how its decoders scale and drain, and the GPUs of each; without prefillers.
        plan: its conversations, by when they arrive.
        start_s: how long an engine takes to start.
    """

    system: System
    settings: Settings
    plan: Iterable[tuple[float, Script]]
    start_s: float = 60.0

    @property
    def engine_gpus(self) -> int:
        own = self.settings.decoders
        return int(self.settings.workers_of(own) * own.num_gpus)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A model's figures.

    Attributes:
        engines: their numbers, second by second: those that serve, start and leave.
        engine_gpus: GPUs of each of them.
    """

    result: Result
    engines: list[int]
    starts: int
    engine_gpus: int


def simulate_sharing(
    models: Mapping[str, Model],
    gpus: int,
    *,
    shares: bool,
    on_conversation: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """Run all models to the end of their conversations, on engines that share these GPUs.

    Raises SimulationError: the GPUs do not suffice for the least, or a model has no conversation.
    """
    least = sum(len(model.system.decoders) * model.engine_gpus for model in models.values())
    if gpus < least:
        raise SimulationError(f"{least} GPUs are the least for these models, and there are {gpus}")
    clusters = {name: ScalingCluster(model, on_conversation) for name, model in models.items()}
    for name, cluster in clusters.items():
        cluster.start(models[name].plan)
    now_s = 0.0
    while any(cluster.open for cluster in clusters.values()):
        now_s += 1.0
        for cluster in clusters.values():
            cluster.advance(now_s)
        lacks = {name: cluster.autoscaler.lacks or NO_LACK for name, cluster in clusters.items()}
        for name, cluster in clusters.items():
            free = gpus - sum(one.gpus for one in clusters.values())
            others = (lack for other, lack in lacks.items() if other != name)
            lack = Lack(*map(sum, zip(NO_LACK, *others, strict=True)))
            cluster.look(now_s, lack if shares else None, free)
    found = {}
    for name, cluster in clusters.items():
        if not cluster.turns:
            raise SimulationError(f"{name} has no turns; give more conversations")
        model_gpus = models[name].engine_gpus
        found[name] = Outcome(cluster.tally.result(), cluster.counts, cluster.starts, model_gpus)
    return found


class ScalingCluster(Cluster):
    """A cluster of one model whose decoders come and go, as its autoscaler decides.

    Attributes:
        counts: its engines at each look: those that serve, start and leave.
        starts: engines that were started since the beginning.
    """

    def __init__(self, model: Model, on_conversation: Callable[[], None]) -> None:
        self.tally = Tally()

        def ended(turns: list[TurnRecord]) -> None:
            self.tally.add(turns)
            on_conversation()

        super().__init__(model.system, ended)
        self._model = model
        self._next = len(self.decoders)
        self.autoscaler = make_autoscaler(model.settings)
        self.autoscaler.pays_after_s = model.start_s
        self._ready_s: deque[float] = deque()
        self._leaving: dict[str, float] = {}
        self._began_s: dict[str, float] = {}
        self.counts: list[int] = []
        self.starts = 0

    @property
    def engines(self) -> int:
        return len(self.decoders) + len(self._ready_s)

    @property
    def gpus(self) -> int:
        return self.engines * self._model.engine_gpus

    def look(self, now_s: float, lack: Lack | None, free: int) -> None:
        """Have engines join and leave; ``lack`` is the others', where models share GPUs.

        ``free`` GPUs belong to no engine of any model.
        """
        while self._ready_s and self._ready_s[0] <= now_s:
            self._ready_s.popleft()
            self._join(now_s)
        self._drain(now_s)
        there = len(self.decoders) - len(self._leaving)
        others = None
        if lack is not None:
            self.autoscaler.lack({"decoder": there}, len(self._ready_s), now_s)
            used_tokens = self.table.used_tokens(now_s - self._model.start_s)
            others = Others(lack, used_tokens, {"decoder": len(self._leaving)})
        waiting_tokens = self._admission.queue.tokens
        self.autoscaler.decide(self.table.decoders.values(), (), waiting_tokens, now_s, others)
        wanted = self.autoscaler.replicas("decoder") - there - len(self._ready_s)
        for _ in range(min(wanted, free // self._model.engine_gpus)):
            self.starts += 1
            self._ready_s.append(now_s + self._model.start_s)
        for _ in range(min(-wanted, len(self._ready_s))):
            self._ready_s.pop()
        stay = [name for name in self.decoders if name not in self._leaving]
        for name in stay[: max(0, len(stay) - self.autoscaler.replicas("decoder"))]:
            self.table.leave(name)
            self._leaving[name] = now_s
        self.counts.append(self.engines)

    def _join(self, now_s: float) -> None:
        name = f"decoder-{self._next}"
        self._next += 1
        engine = self._engine(name, self._model.system.decoders[0], self._answered)
        self.decoders = {**self.decoders, name: engine}
        self._hosts(name, engine, now_s)
        self._admit(now_s)

    def _drain(self, now_s: float) -> None:
        # As in `deployments.table.membership`: conversations move at once where another model
        # waits for the GPUs, or where this one wants the engine's successor.
        scaling = self.autoscaler.wanted["decoder"].scaling
        there = len(self.decoders) - len(self._leaving)
        at_once = scaling.given or there < scaling.replicas
        for name, since_s in [*self._leaving.items()]:
            if at_once or now_s - since_s >= self._model.settings.drain_timeout_s:
                self.table.evict(name)
            if not self.table.decoders[name].conversations:
                self.table.remove_engine(name)
                del self._leaving[name], self._homes[name]
                self.decoders = {id: one for id, one in self.decoders.items() if id != name}

    def _start(self, one: Open, admitted: Admitted, now_s: float) -> None:
        if not admitted.known:
            self._began_s[one.script.conversation] = now_s
            self.autoscaler.conversation_bound(now_s)
        super()._start(one, admitted, now_s)

    def _closed(self, one: Open, now_s: float) -> None:
        began_s = self._began_s.pop(one.script.conversation, None)
        if began_s is not None:
            last = one.records[-1]
            tokens = last.prompt_tokens + last.output_tokens
            self.autoscaler.conversation_ended(now_s - began_s, tokens)
        super()._closed(one, now_s)
