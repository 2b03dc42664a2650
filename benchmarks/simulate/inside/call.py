"""A call: one turn of a conversation, as an engine works on it."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Call:
    """A turn.

    Attributes:
        key: its conversation's.
        resume_s, last: when its client says that the next turn comes, and whether none does.
        since_s: it waits since then: it came, or was preempted.
        computed_tokens: of which there is KV here while it runs.
        decodes: whether all before its newest token is computed.
        found_tokens: what the cache had of it when it began first; negative before.
        charged_tokens: up to where its conversation was charged.
        missed_tokens: of its prompt, not in the cache when it came.
        level: as it was ranked last; 0 goes first.
        first_token_s, last_token_s: negative before.
        gaps_s: between its tokens; steps that were taken together count one by one.
    """

    key: str
    prompt_tokens: int
    output_tokens: int
    conversation_came_s: float = 0.0
    came_s: float = 0.0
    resume_s: float | None = None
    last: bool = False
    since_s: float = 0.0
    computed_tokens: int = 0
    made_tokens: int = 0
    runs: bool = False
    decodes: bool = False
    found_tokens: int = -1
    charged_tokens: int = 0
    missed_tokens: int = 0
    level: int = 0
    preemptions: int = 0
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.made_tokens

    @property
    def missing_tokens(self) -> int:
        return self.tokens - self.computed_tokens
