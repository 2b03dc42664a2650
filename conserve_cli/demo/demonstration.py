"""Holds what a demonstration saw against what was promised."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn; counts in tokens, as the engines reported them; ``does`` is what it called."""

    conversation: str
    turn: int
    prompt_tokens: int
    decoder_cached_tokens: int
    lmcache_tokens: int
    ttft_s: float
    output_tokens: int
    decoder: str
    does: str = ""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """How an agent's task ended.

    Attributes:
        ttfet_s: time from its first request to the first token of its answer; None without one.
        right: whether the answer states what it should.
    """

    conversation: str
    text: str
    ttfet_s: float | None
    right: bool


@dataclass(slots=True)
class Demonstration:
    """Tells what the demonstration saw.

    Attributes:
        handoffs: turns that took KV from LMCache.
        moves: turns that ran on another decoder than the one before.
        errors: turns that failed, with what was said, in ``problems``.
    """

    turns: list[TurnRow] = field(default_factory=list)
    answers: list[AgentAnswer] = field(default_factory=list)
    handoffs: int = 0
    moves: int = 0
    errors: int = 0
    problems: list[str] = field(default_factory=list)

    def verdict(
        self, conversations: int, turns: int, *, always_handed_off: bool = False
    ) -> list[str]:
        """Return what is not as promised; empty if all is.

        Args:
            conversations: how many there should be.
            turns: how many each should have at least.
            always_handed_off: whether every first prompt comes from a prefiller.
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
        return wrong


def write_json(seen: Demonstration, path: Path) -> None:
    """Write what was seen as JSON, for programs."""
    body = {
        "turns": [asdict(row) for row in seen.turns],
        "handoffs": seen.handoffs,
        "moves": seen.moves,
        "errors": seen.errors,
        "answers": [asdict(answer) for answer in seen.answers],
    }
    path.write_text(json.dumps(body, indent=2) + "\n")
