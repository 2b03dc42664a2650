"""The engines of a table: which are there, which accept new work, and prefillers' queues."""

from conserve.history import History
from conserve.placement import Decoder, EngineLoad, Loads, Prefiller


class Engines:
    """Decoders and prefillers, as placement sees them; a prefiller that hosts is both.

    ``loads`` is what is known of their work; None if the policy does not ask.
    """

    def __init__(self, loads: Loads | None) -> None:
        self.loads = loads
        self.decoders: dict[str, Decoder] = {}
        self.prefillers: dict[str, Prefiller] = {}
        self._any_leaves = False

    def add_prefiller(self, prefiller_id: str) -> None:
        self.prefillers.setdefault(prefiller_id, Prefiller(prefiller_id))

    def add_decoder(self, decoder_id: str, capacity_tokens: int) -> None:
        if decoder_id not in self.decoders:
            self.decoders[decoder_id] = Decoder(decoder_id, capacity_tokens)

    def remove(self, engine_id: str) -> None:
        self.decoders.pop(engine_id, None)
        self.prefillers.pop(engine_id, None)
        if self.loads is not None:
            self.loads.gone(engine_id)

    def says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        if self.loads is not None and (engine_id in self.decoders or engine_id in self.prefillers):
            self.loads.says(engine_id, load, now_s)

    def left(self, history: History) -> None:
        if self.loads is not None and history.home is not None:
            self.loads.left(history.id, history.home)

    def leave(self, engine_id: str) -> None:
        """Give an engine nothing new; it keeps what it has."""
        self._any_leaves = True
        for one in (self.decoders.get(engine_id), self.prefillers.get(engine_id)):
            if one is not None:
                one.leaving = True

    @property
    def accepting_decoders(self) -> list[Decoder]:
        decoders = self.decoders.values()
        return [one for one in decoders if not one.leaving] if self._any_leaves else [*decoders]

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        prefillers = self.prefillers.values()
        return [one for one in prefillers if not one.leaving] if self._any_leaves else [*prefillers]

    def join_queue(self, history: History, prefiller_id: str, tokens: int) -> None:
        """Queue a history's tokens, of which none are queued yet, at a prefiller."""
        history.prefiller_id = prefiller_id
        history.prefill_tokens = tokens
        self.prefillers[prefiller_id].queued_tokens += tokens

    def leave_queue(self, history: History) -> None:
        """Take a history out of its prefiller's queue, if it is in one."""
        if history.prefiller_id is None:
            return
        if self.loads is not None:
            self.loads.done(history.prefiller_id, history.id)
        prefiller = self.prefillers.get(history.prefiller_id)
        if prefiller is not None:
            prefiller.queued_tokens -= history.prefill_tokens
        history.prefiller_id = None
        history.prefill_tokens = 0
