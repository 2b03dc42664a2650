"""The engines of a table: which are there, which accept new work, and prefillers' queues."""

from conserve.history import History
from conserve.placement import Decoder, EngineLoad, Loads, Prefiller


class Engines:
    """Decoders and prefillers, as placement sees them.

    Attributes:
        evicting: ids of decoders whose histories are unbound as soon as none of their turns runs.
        loads: what is known of their work; None if the policy does not ask.
    """

    def __init__(self, loads: Loads | None) -> None:
        self.loads = loads
        self.decoders: dict[str, Decoder] = {}
        self.prefillers: dict[str, Prefiller] = {}
        self.evicting: set[str] = set()
        self._leaving: set[str] = set()

    def add_prefiller(self, prefiller_id: str) -> None:
        self.prefillers.setdefault(prefiller_id, Prefiller(prefiller_id))

    def add_decoder(self, decoder_id: str, capacity_tokens: int) -> None:
        if decoder_id not in self.decoders:
            self.decoders[decoder_id] = Decoder(decoder_id, capacity_tokens)

    def remove_prefiller(self, prefiller_id: str) -> None:
        del self.prefillers[prefiller_id]
        self._forget(prefiller_id)

    def remove_decoder(self, decoder_id: str) -> None:
        del self.decoders[decoder_id]
        self.evicting.discard(decoder_id)
        self._forget(decoder_id)

    def says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        if self.loads is not None and (engine_id in self.decoders or engine_id in self.prefillers):
            self.loads.says(engine_id, load, now_s)

    def left(self, history: History) -> None:
        if self.loads is not None and history.home is not None:
            self.loads.left(history.id, history.home)

    def _forget(self, engine_id: str) -> None:
        self._leaving.discard(engine_id)
        if self.loads is not None:
            self.loads.gone(engine_id)

    def leave(self, engine_id: str) -> None:
        """Give an engine nothing new; it keeps what it has."""
        self._leaving.add(engine_id)

    def is_leaving(self, engine_id: str) -> bool:
        return engine_id in self._leaving

    @property
    def accepting_decoders(self) -> list[Decoder]:
        """Return the decoders to which conversations may be bound."""
        if not self._leaving:
            return list(self.decoders.values())
        return [one for one in self.decoders.values() if one.id not in self._leaving]

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        """Return the prefillers to which prompts may be sent."""
        if not self._leaving:
            return list(self.prefillers.values())
        return [one for one in self.prefillers.values() if one.id not in self._leaving]

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
