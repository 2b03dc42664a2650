"""The stepped engine with the conversation scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve.wire import scheduled_turn
from tests.unit.deployments.engine.stepping import SteppedEngine


@dataclass
class StandIn(SteppedEngine):
    """One engine without a model.

    Args:
        kind: ``sync`` or ``async`` of ours, or ``vllm``.
        policies: ``additional_config["conserve"]``.
    """

    kind: str = "sync"
    policies: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.two_in_flight = self.kind == "async"
        super().__post_init__()

    def _configure(self, config: Any) -> None:
        config.additional_config = {"conserve": self.policies}
        if self.kind != "vllm":
            config.scheduler_config.scheduler_cls = (
                "conserve_inside.scheduler.scheduling.conversation_scheduler"
            )
            config.scheduler_config.policy = "priority"

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int = 4,
        key: str | None = None,
        resume_s: float | None = None,
        last: bool = False,
        background: bool = False,
        **more: Any,
    ) -> Any:
        """Add a request; a history's turn where it has a key."""
        told = None if key is None else scheduled_turn(key, resume_s, last, background)
        return super().add(name, tokens, max_tokens, told=told, **more)

    def turn(self, key: str, tokens: Sequence[int], max_tokens: int = 4, **more: Any) -> list[int]:
        """A history's turn alone; its prompt and answer."""
        name = f"{key}@{self.steps}"
        request = self.add(name, tokens, max_tokens, key, **more)
        self.drain()
        return [*tokens, *request.output_token_ids]
