"""Records of a demonstration: its turns and answers, and whether they are as promised."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn, with tokens and images as the engines reported them; ``does`` is what it called."""

    conversation: str
    turn: int
    prompt_tokens: int
    decoder_cached_tokens: int
    lmcache_tokens: int
    ttft_s: float
    output_tokens: int
    decoder: str
    does: str = ""
    images: int = 0  # In the prompt.
    encoded_images: int = 0  # Encoded for this turn, on any engine.
    node_images: int = 0  # Taken from the node's memory instead.
    again: int = 0  # How often it was sent again.
    # In each stage on its decoder; 0: it did not go through that stage.
    encode_wait_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


# The fields that are the server's, by the names in which it reports a turn.
REPORTED = (
    "prompt_tokens", "decoder_cached_tokens", "lmcache_tokens", "output_tokens", "encoded_images",
    "node_images", "encode_wait_s", "encode_s", "prefill_s", "decode_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """An agent's answer to its task."""

    conversation: str
    text: str
    ttfet_s: float | None  # None without an answer.
    right: bool


@dataclass(slots=True)
class Demonstration:
    """Everything that the demonstration saw."""

    turns: list[TurnRow] = field(default_factory=list)
    answers: list[AgentAnswer] = field(default_factory=list)
    handoffs: int = 0  # Turns that took KV from LMCache.
    moves: int = 0  # Turns that ran on another decoder than the one before.
    errors: int = 0
    problems: list[str] = field(default_factory=list)
    # Where a router was killed: answers that were rejoined, and tokens that engines generated.
    rejoined: int = 0
    generated_tokens: int | None = None
    # Of agents that see: different images that were shown, clicks, and those on the right button.
    images: int = 0
    clicks: int = 0
    hits: int = 0

    @property
    def shown_images(self) -> int:
        return sum(row.images for row in self.turns)

    @property
    def encoded_images(self) -> int:
        return sum(row.encoded_images for row in self.turns)

    @property
    def node_images(self) -> int:
        return sum(row.node_images for row in self.turns)

    @property
    def again(self) -> int:
        return sum(row.again > 0 for row in self.turns)

    @property
    def twice_tokens(self) -> int:
        """Return how many tokens were generated beyond those of answers, and one a prefill."""
        once = sum(row.output_tokens for row in self.turns) + self.handoffs
        return 0 if self.generated_tokens is None else self.generated_tokens - once

    @property
    def staged(self) -> bool:
        """Return whether a decoder encoded or prefilled beside its steps."""
        return any(row.encode_wait_s or row.encode_s or row.prefill_s for row in self.turns)

    def verdict(
        self,
        conversations: int,
        turns: int,
        *,
        always_handed_off: bool = False,
        encoded_once: bool = False,
    ) -> list[str]:
        """Return what is not as promised, for this many conversations of at least ``turns`` turns.

        Args:
            always_handed_off: every first prompt has to come from a prefiller.
            encoded_once: all engines are on one node, so none encodes what another one has.
        """
        wrong = list(self.problems)
        by_conversation: dict[str, list[TurnRow]] = {}
        for row in self.turns:
            by_conversation.setdefault(row.conversation, []).append(row)
        if len(by_conversation) != conversations:
            wrong.append(f"{len(by_conversation)} conversations were seen, not {conversations}")
        for name, rows in by_conversation.items():
            if len(rows) < turns:
                wrong.append(f"{name}: {len(rows)} turns succeeded, not {turns} or more")
            handed = [row.turn for row in rows if row.lmcache_tokens]
            if handed != [1] and (always_handed_off or handed):
                wrong.append(f"{name}: handed off in turns {handed}, not once, in turn 1")
            if len({row.decoder for row in rows}) != 1:
                wrong.append(f"{name}: changed its decoder")
        if encoded_once and self.encoded_images > self.images:
            wrong.append(f"{self.images} images were encoded {self.encoded_images} times")
        if self.generated_tokens is not None and not self.again:
            wrong.append("no turn was sent again: no router was killed, or no answer came from it")
        if self.twice_tokens:
            wrong.append(f"{self.twice_tokens} tokens of answers were computed twice")
        return wrong


def write_json(seen: Demonstration, path: Path) -> None:
    body = asdict(seen)
    del body["problems"]
    path.write_text(json.dumps(body, indent=2) + "\n")
