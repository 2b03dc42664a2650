"""Makes, finds and calls the actors that an application, or a node of it, has one of."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conserve.errors import ApiError
from deployments.messages import HEAD_NODE, Refusal

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def listed(beginning: str) -> list[str]:
    """Return the names of actors that live or restart. Ray answers within milliseconds."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in found if actor["namespace"] == "serve")
    return [name for name in names if name.startswith(beginning)]


def find_or_make(
    kind: type,
    name: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    node_id: str | None = None,
) -> Any:
    """Return the actor of this name; the first caller makes it.

    It outlives the replica that happened to start it, is restarted however often it dies, and has
    to end itself when no caller is left.

    Args:
        kind: its class.
        environment: variables of its process.
        node_id: the node that it runs on; None: the head node, where the routers are.
    """
    place: dict[str, Any] = {"resources": {HEAD_NODE: 0.001}}
    if node_id is not None:
        place = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
    made = ray.remote(kind).options(
        name=name,
        namespace="serve",
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=100_000,
        num_cpus=0,
        runtime_env={"env_vars": dict(environment)} if environment else None,
        **place,
    )
    return made.remote(*arguments)


def call(
    actor: Any,
    method: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Answer]],
    *given: Given.args,
    **named: Given.kwargs,
) -> Any:
    """Call a method of an actor's class; returns Ray's reference to the answer."""
    return getattr(actor, method.__name__).remote(*given, **named)


def unrefused(answer: Answer | Refusal) -> Answer:
    """Return an answer; raises `ApiError` if it is a refusal."""
    if isinstance(answer, Refusal):
        raise ApiError(
            answer.status, answer.message, answer.code, retry_after_s=answer.retry_after_s
        )
    return answer


class Patience(NamedTuple):
    """How long a caller waits, in seconds.

    Attributes:
        down_s: for an actor that is down.
        answer_s: for one that lives and does not answer; None: without a bound, as with what waits
            for room.
    """

    down_s: float = 30.0
    answer_s: float | None = None


USUAL = Patience()


class ActorClient(ABC):
    """A caller's end of an actor: finds it, and finds it again once Ray has started it again."""

    _actor: Any = None

    @abstractmethod
    def _connect(self) -> Any:
        """Return the actor; `_actor` is None where it has to be found or made first."""

    @abstractmethod
    def _unavailable(self, why: str) -> Exception:
        """Return the error for an actor that does not answer; ``why`` completes the sentence."""

    async def _ask(
        self,
        patience: Patience,
        method: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Answer | Refusal]],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Answer:
        """Call a method that may be called twice; raises `ApiError` if the actor refuses.

        Raises what `_unavailable` makes of an actor that is silent, or stays down.
        """
        deadline_s = time.monotonic() + patience.down_s
        while True:
            try:
                async with asyncio.timeout(patience.answer_s):
                    answer: Answer | Refusal = await call(self._connect(), method, *given, **named)
                    return unrefused(answer)
            except TimeoutError:
                if patience.answer_s is None:
                    raise
                raise self._unavailable(f"did not answer within {patience.answer_s:g} s") from None
            except ray.exceptions.RayActorError as error:
                self._actor = None
                if time.monotonic() > deadline_s:
                    raise self._unavailable(f"is down: {type(error).__name__}") from error
                await asyncio.sleep(0.1)

    def _tell(
        self,
        method: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Any]],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> None:
        """Call a method without waiting: what it raises is dropped."""
        try:
            call(self._connect(), method, *given, **named)
        except ray.exceptions.RayActorError:
            self._actor = None


def asks(
    method: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Answer | Refusal]],
    patience: Patience = USUAL,
) -> Callable[Concatenate[ActorClient, Given], Coroutine[Any, Any, Answer]]:
    """Return the method of an `ActorClient` that calls this one of the actor's; see `_ask`."""

    async def asked(client: ActorClient, /, *given: Given.args, **named: Given.kwargs) -> Answer:
        return await client._ask(patience, method, *given, **named)

    return asked
