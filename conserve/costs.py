"""Accounts for decoders' KV space over time: ThunderAgent's five terms, in token-seconds."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, get_args

from conserve.turn import TurnStats

Term = Literal["decode", "prefill", "recompute", "unused", "caching"]
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(slots=True)
class _Turn:
    decoder_id: str
    tokens: int
    had_tokens: int
    began_s: float
    # `_Decoder.used_s` at its begin.
    used_s: float


@dataclass(slots=True)
class _Decoder:
    capacity_tokens: int
    looked_s: float
    held_tokens: int = 0
    # The sum of the turns' tokens, and the seconds that each of these has used so far.
    running_tokens: int = 0
    used_s: float = 0.0
    turns: set[Hashable] = field(default_factory=set)
    terms: dict[Term, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))

    def go_on(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self.looked_s)
        self.looked_s = max(self.looked_s, now_s)
        # Tokens held beyond the capacity are scaled down to it.
        there = min(self.held_tokens, self.capacity_tokens)
        running = min(self.running_tokens, self.held_tokens) * there / max(1, self.held_tokens)
        if self.running_tokens:
            self.used_s += passed_s * running / self.running_tokens
        self.terms["caching"] += passed_s * (there - running)
        self.terms["unused"] += passed_s * (self.capacity_tokens - there)


class SpaceTimeCosts:
    """Divides each decoder's KV space, times the time, by what it is used for.

    The terms are those of ThunderAgent's equation 3, integrals of tokens over time (equation 2):

    - ``unused``: held for no history; includes paused histories.
    - ``caching``: held for idle histories, and for running ones beyond what they held as their
      turns began.
    - ``decode``, ``prefill``, ``recompute``: what histories held as a turn began, until its end.
      ``decode`` is the time from the first token to the last. The rest is divided as the computed
      tokens are: those beyond what the prompt has grown by are ``recompute``, the others
      ``prefill``. Without times it is all decode, and without stats all prefill.

    Unlike in the paper, a turn's growth counts only from its end on, tokens above the capacity are
    scaled down to it, and what running turns share counts once.
    """

    def __init__(self) -> None:
        self._decoders: dict[str, _Decoder] = {}
        self._turns: dict[Hashable, _Turn] = {}
        self.recomputed_tokens = 0

    @property
    def decoders(self) -> list[str]:
        return list(self._decoders)

    def terms(self, decoder_id: str) -> dict[Term, float]:
        """Return a decoder's costs until it was last looked at."""
        return dict(self._decoders[decoder_id].terms)

    def running(self, decoder_id: str) -> float:
        """Return what running turns have used, which will be decode, prefill or recompute."""
        decoder = self._decoders[decoder_id]
        return sum(self._used(self._turns[turn], decoder) for turn in decoder.turns)

    def add(self, decoder_id: str, capacity_tokens: int, now_s: float) -> None:
        if decoder_id not in self._decoders:
            self._decoders[decoder_id] = _Decoder(capacity_tokens, now_s)

    def remove(self, decoder_id: str) -> None:
        decoder = self._decoders.pop(decoder_id, None)
        for turn in () if decoder is None else decoder.turns:
            del self._turns[turn]

    def look(self, decoder_id: str, held_tokens: int, now_s: float) -> None:
        decoder = self._decoders.get(decoder_id)
        if decoder is not None:
            decoder.go_on(now_s)
            decoder.held_tokens = held_tokens

    def begin(
        self, turn: Hashable, decoder_id: str, tokens: int, had_tokens: int, now_s: float
    ) -> None:
        """Note that a turn begins.

        Args:
            tokens: what its history holds on its decoder; 0 if another turn of it runs.
            had_tokens: the history's length after its last turn.
        """
        decoder = self._decoders.get(decoder_id)
        if decoder is None or turn in self._turns:
            return
        decoder.go_on(now_s)
        decoder.running_tokens += tokens
        decoder.turns.add(turn)
        self._turns[turn] = _Turn(decoder_id, tokens, had_tokens, now_s, decoder.used_s)

    def end(self, turn: Hashable, stats: TurnStats | None, now_s: float) -> None:
        """Note that a turn has ended; ``stats`` is None if its engine's work is not known."""
        one = self._turns.pop(turn, None)
        if one is None:
            return
        decoder = self._decoders[one.decoder_id]
        decoder.go_on(now_s)
        decoder.running_tokens -= one.tokens
        decoder.turns.discard(turn)
        used = self._used(one, decoder)
        decoding, again = 0.0, 0.0
        if stats is not None:
            took_s = now_s - one.began_s
            decoding = 1.0
            if stats.decode_s is not None and took_s > 0:
                decoding = min(1.0, max(0.0, stats.decode_s) / took_s)
            found = stats.found_tokens
            computed = max(0, stats.prompt_tokens - found) + stats.remote_tokens
            grown = max(0, stats.prompt_tokens - one.had_tokens)
            recomputed = max(0, computed - grown) if one.had_tokens else 0
            self.recomputed_tokens += recomputed
            again = recomputed / max(1, computed)
        decoder.terms["decode"] += used * decoding
        decoder.terms["recompute"] += used * (1 - decoding) * again
        decoder.terms["prefill"] += used * (1 - decoding) * (1 - again)

    @staticmethod
    def _used(turn: _Turn, decoder: _Decoder) -> float:
        return turn.tokens * (decoder.used_s - turn.used_s)
