"""What can be observed of an engine's work."""

import msgspec


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """What an engine says of its work, with each beat.

    Attributes:
        prefill_tokens: of the prompts that it has and has not computed yet, beyond what caches had.
        decodes: requests past their first token.
        step_s: how long an iteration without prefill has taken of late; 0: not known.
        prefill_tokens_per_s: how fast it has computed prompts of late; 0: not known.

    Example:
        >>> EngineLoad(prefill_tokens=1800, decodes=12, step_s=0.03)
        EngineLoad(prefill_tokens=1800, decodes=12, step_s=0.03, prefill_tokens_per_s=0.0)
    """

    prefill_tokens: int = 0
    decodes: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
