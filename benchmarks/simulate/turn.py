"""A turn, as one simulated engine works on it."""

from benchmarks.records import SharedPrefix


class EngineTurn:
    """A turn on one engine.

    Attributes:
        conversation: its id.
        prompt_tokens, output_tokens: whole lengths; a prefiller's output is one token.
        reusable_tokens: length of the prompt's prefix that an earlier turn had as well.
        loaded_tokens: prompt tokens whose KV a handoff brought here.
        load_s: how long loading that KV keeps the engine busy; 0 where it goes on meanwhile.
        turn: whatever the caller wants to find the turn by.
        priority: the lowest goes first, and of equal ones who came first (vLLM's
            ``--scheduling-policy priority``).
        shared: what the prompt begins with that other conversations' prompts do, too.
        cached_tokens: prompt tokens whose KV was here already, a handoff not counted.
        admitted_s: when the engine took it from its line for the first time; negative before.
        first_token_s: when its first token came; negative before.
    """

    __slots__ = (
        "admitted_s", "begun", "cached_tokens", "came", "conversation", "finish_step",
        "first_token_s", "left_tokens", "load_s", "loaded_tokens", "made_tokens", "number",
        "output_tokens", "past_tokens", "preempted", "priority", "prompt_tokens", "reusable_tokens",
        "shared", "turn",
    )  # fmt: skip

    def __init__(
        self,
        conversation: str,
        prompt_tokens: int,
        output_tokens: int,
        reusable_tokens: int = 0,
        loaded_tokens: int = 0,
        load_s: float = 0.0,
        turn: object = None,
        priority: float = 0.0,
        shared: tuple[SharedPrefix, ...] = (),
    ) -> None:
        self.conversation = conversation
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.reusable_tokens = reusable_tokens
        self.loaded_tokens = loaded_tokens
        self.load_s = load_s
        self.turn = turn
        self.priority = priority
        self.shared = shared
        # How many came before it, to this engine.
        self.came = -1
        self.cached_tokens = 0
        self.admitted_s = -1.0
        self.first_token_s = -1.0
        self.made_tokens = 0
        # How many of the tokens to prefill (the prompt; after a preemption what was put out, too)
        # are there, and how many are left.
        self.past_tokens = 0
        self.left_tokens = 0
        self.begun = False
        self.preempted = False
        # While it decodes: the step at whose end it is done, and which admission this was.
        self.finish_step = -1
        self.number = -1

    @property
    def shared_tokens(self) -> int:
        """Return what of its prompt is not its conversation's alone."""
        return self.shared[-1].tokens if self.shared else 0
