"""The state that a placement policy reads, and its decision."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Decoder:
    """A decoder as the policy sees it.

    Attributes:
        held_tokens: for live conversations, those promised included.
        kept_tokens: the part of its capacity that is kept free of new histories.
        leaving: whether it gets nothing new.
        evicting: whether its histories are unbound as soon as none of their turns runs.
    """

    id: str
    capacity_tokens: int
    held_tokens: int = 0
    conversations: int = 0
    kept_tokens: int = 0
    leaving: bool = False
    evicting: bool = False

    @property
    def occupancy(self) -> float:
        return self.held_tokens / self.capacity_tokens

    @property
    def free_tokens(self) -> int:
        """Return how many more tokens may be promised; negative if too many are held."""
        return self.capacity_tokens - self.kept_tokens - self.held_tokens

    def has_room(self, tokens: int) -> bool:
        """Return whether ``tokens`` more fit. An empty decoder takes any prompt."""
        return tokens <= self.free_tokens or self.conversations == 0


@dataclass(slots=True)
class Prefiller:
    """A prefiller, with the tokens of prefills sent to it and not yet done.

    ``leaving``: it gets nothing new.
    """

    id: str
    queued_tokens: int = 0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The decoder for the conversation's life, and the prefiller for its first turn, if any.

    ``after`` is a prefill whose end the turn waits for, as its KV is loaded from host memory then.
    """

    decoder_id: str
    prefiller_id: str | None
    after: "Coming | None" = None


@dataclass(frozen=True, slots=True)
class Coming:
    """A prefill of another history that will leave a prompt's first ``tokens`` in host memory.

    It is expected to take ``done_in_s``.
    """

    history_id: str
    engine_id: str
    tokens: int
    done_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shared:
    """The part of a prompt that decoders hold already, as the beginning of other histories.

    Attributes:
        tokens: by decoder; only those that hold any, or will.
        warm_on: the decoder with the history that the prompt branches off, or with the other
            histories of its conversation; None if only a system part is shared.
        coming_to: the decoder to which that history is promised while it is computed elsewhere.
        left_on, left_tokens: the decoder that should still have a paused history's KV, and how
            much.
        parked_tokens: what host memory has of the history, or of others' beginning, for any
            decoder.
        coming: the prefill that brings most to host memory; None if none brings more.
        encode_tokens: embeddings of the prompt's images that were not encoded on the node of the
            engine that counted it.
        away: decoders whose ``tokens`` are promised, and computed elsewhere.
        background: whether its turns wait for others'.
        adapter: its adapter's id; empty: it has none.
    """

    tokens: Mapping[str, int]
    warm_on: str | None = None
    coming_to: str | None = None
    left_on: str | None = None
    left_tokens: int = 0
    parked_tokens: int = 0
    coming: Coming | None = None
    encode_tokens: int = 0
    away: Collection[str] = ()
    background: bool = False
    adapter: str = ""

    @property
    def most(self) -> int:
        """Return how much of a prompt is computed for others, or about to be."""
        coming_tokens = self.coming.tokens if self.coming else 0
        return max((*self.tokens.values(), self.parked_tokens, coming_tokens))

    def beyond(self, tokens: int, decoder_id: str) -> int:
        """Return how much of a prompt of ``tokens`` a decoder does not hold yet."""
        return max(0, tokens - self.tokens.get(decoder_id, 0))

    def there(self, engine_id: str) -> int:
        """Return how much of a prompt an engine has computed and should still have."""
        tokens = self.tokens.get(engine_id, 0)
        if engine_id == self.coming_to and engine_id != self.warm_on:
            tokens = 0
        if engine_id in self.away:
            tokens = 0
        if self.coming is not None and engine_id == self.coming.engine_id:
            tokens = self.coming.tokens
        return max(tokens, self.left_tokens) if engine_id == self.left_on else tokens

    def found(self, decoder_id: str) -> int:
        """Return how much of a prompt a decoder has, or gets from host memory."""
        return max(self.there(decoder_id), self.parked_tokens)


NOTHING_SHARED = Shared({})


def emptiest_decoder(
    prompt_tokens: int, decoders: Iterable[Decoder], shared: Shared = NOTHING_SHARED
) -> Decoder | None:
    """Return the decoder with room and the lowest occupancy, then the fewest conversations."""
    best: Decoder | None = None
    least = (0.0, 0)
    nothing_shared = not shared.tokens
    for decoder in decoders:
        tokens = prompt_tokens if nothing_shared else shared.beyond(prompt_tokens, decoder.id)
        if not decoder.has_room(tokens):
            continue
        emptiness = (decoder.occupancy, decoder.conversations)
        if best is None or emptiness < least:
            best, least = decoder, emptiness
    return best


def shortest_queue(prefillers: Iterable[Prefiller]) -> str | None:
    """Return the prefiller with the fewest tokens still to prefill, or None without any."""
    best: Prefiller | None = None
    for prefiller in prefillers:
        if best is None or prefiller.queued_tokens < best.queued_tokens:
            best = prefiller
    return None if best is None else best.id
