"""Accounts for decoders' KV space over time: ThunderAgent's five terms, in token-seconds."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, get_args

from conserve.history import TurnStats

Term = Literal["decode", "prefill", "recompute", "unused", "caching"]
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(slots=True)
class _Turn:
    decoder_id: str
    tokens: int
    had_tokens: int
    began_s: float
    # What a token of it had used by then.
    used_s: float
    remote_tokens: int = 0


@dataclass(slots=True)
class _Decoder:
    capacity_tokens: int
    looked_s: float
    held_tokens: int = 0
    # The sum of the turns' tokens, and what one of these has used so far, in seconds.
    running_tokens: int = 0
    used_s: float = 0.0
    turns: set[Hashable] = field(default_factory=set)
    terms: dict[Term, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))

    def go_on(self, now_s: float) -> None:
        """Count what passed since it was looked at last."""
        passed_s = max(0.0, now_s - self.looked_s)
        self.looked_s = max(self.looked_s, now_s)
        # What is held beyond the capacity is nowhere: what is there are as many tokens of each.
        there = min(self.held_tokens, self.capacity_tokens)
        running = min(self.running_tokens, self.held_tokens) * there / max(1, self.held_tokens)
        if self.running_tokens:
            self.used_s += passed_s * running / self.running_tokens
        self.terms["caching"] += passed_s * (there - running)
        self.terms["unused"] += passed_s * (self.capacity_tokens - there)


class SpaceTimeCosts:
    """Divides each decoder's KV space, times the time, by what it is used for.

    The terms are those of ThunderAgent's equation 3, each an integral of tokens over time (equation
    2). Here they are taken from the account of what is held, and from what engines report at a
    turn's end:

    - ``unused``: what nothing is held of. That includes paused histories, of which an engine may
      have the KV yet, since they have no claim to it (in the paper, a pause frees memory).
    - ``caching``: what is held for histories of which no turn runs, and for running ones beyond
      what they held as their turns began.
    - ``decode``, ``prefill``, ``recompute``: what histories held as a turn of theirs began (a first
      turn, or one that is placed anew: its prompt), until that turn's end. The time from its first
      to its last token, as its engine says it, is ``decode``; the time before and around that, in
      which it waits, is prefilled, handed off and passed on, is divided as the computed tokens are:
      what was computed beyond what the prompt has grown by since the last turn is ``recompute``,
      the rest ``prefill``. What prefillers compute for a turn counts with it, on its decoder, where
      the room is kept. A turn whose engine does not tell when its tokens came counts as decode, and
      one of which nothing is known as prefill.

    It departs from the paper in that a turn's growth counts from its end on alone, as it does in
    the account; that what is held above the capacity (by the account) is scaled down to it; and
    that what running turns have in common counts once, divided among them.

    The five add up to the capacity times the time since a decoder was added, but for turns that run
    yet, which are counted as they end (`running`). It takes a step for each event. Of turns
    that began before a decoder was added, under a table that was lost, the room counts as caching.

    Attributes:
        recomputed_tokens: how many were computed again.

    Example:
        >>> costs = SpaceTimeCosts()
        >>> costs.add("d", 1000, now_s=0.0)
        >>> costs.look("d", 400, now_s=0.0)
        >>> costs.begin("turn", "d", 400, had_tokens=0, now_s=0.0)
        >>> costs.end("turn", TurnStats(400, 50, 0, 0, decode_s=8.0), now_s=10.0)
        >>> costs.look("d", 450, now_s=10.0)
        >>> costs.look("d", 450, now_s=20.0)
        >>> {term: round(cost) for term, cost in costs.terms("d").items()}
        {'decode': 3200, 'prefill': 800, 'recompute': 0, 'unused': 11500, 'caching': 4500}
    """

    def __init__(self) -> None:
        self._decoders: dict[str, _Decoder] = {}
        self._turns: dict[Hashable, _Turn] = {}
        self.recomputed_tokens = 0

    @property
    def decoders(self) -> list[str]:
        """Ids of those that are there."""
        return list(self._decoders)

    def terms(self, decoder_id: str) -> dict[Term, float]:
        """A decoder's costs until it was looked at last."""
        return dict(self._decoders[decoder_id].terms)

    def running(self, decoder_id: str) -> float:
        """Return what turns have used that run yet: it will be decode, prefill or recompute."""
        decoder = self._decoders[decoder_id]
        return sum(self._used(self._turns[turn], decoder) for turn in decoder.turns)

    def add(self, decoder_id: str, capacity_tokens: int, now_s: float) -> None:
        """A decoder is there from now on, and holds nothing yet."""
        if decoder_id not in self._decoders:
            self._decoders[decoder_id] = _Decoder(capacity_tokens, now_s)

    def remove(self, decoder_id: str) -> None:
        """A decoder is gone; so are its costs, and its turns."""
        decoder = self._decoders.pop(decoder_id, None)
        for turn in () if decoder is None else decoder.turns:
            del self._turns[turn]

    def look(self, decoder_id: str, held_tokens: int, now_s: float) -> None:
        """A decoder holds so much from now on; nothing if it is unknown."""
        decoder = self._decoders.get(decoder_id)
        if decoder is not None:
            decoder.go_on(now_s)
            decoder.held_tokens = held_tokens

    def begin(
        self, turn: Hashable, decoder_id: str, tokens: int, had_tokens: int, now_s: float
    ) -> None:
        """A turn begins.

        Args:
            tokens: what its history holds on its decoder; 0 if another turn of it runs.
            had_tokens: how long the history was after its last turn; 0: it had none.
        """
        decoder = self._decoders.get(decoder_id)
        if decoder is None or turn in self._turns:
            return
        decoder.go_on(now_s)
        decoder.running_tokens += tokens
        decoder.turns.add(turn)
        self._turns[turn] = _Turn(decoder_id, tokens, had_tokens, now_s, decoder.used_s)

    def prefilled(self, turn: Hashable, tokens: int) -> None:
        """A prefiller has computed so many tokens for a turn that runs."""
        if turn in self._turns:
            self._turns[turn].remote_tokens += tokens

    def end(self, turn: Hashable, stats: TurnStats | None, now_s: float) -> None:
        """A turn has ended; nothing if that is known already, or it never began here.

        Args:
            stats: what its engine did; None if that is not known.
        """
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
            computed = max(0, stats.prompt_tokens - found) + one.remote_tokens
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
