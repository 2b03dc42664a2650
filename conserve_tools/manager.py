"""Prepares environments, runs commands in them and removes them, as the ledger says."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from conserve.clock import unix_s
from conserve.errors import ApiError
from conserve.events import Kind
from conserve.settings import EnvironmentSettings
from conserve_tools import answers
from conserve_tools.backends import Backend, Running
from conserve_tools.ledger import Conflict, Environment, Ledger, QuotaExceeded
from conserve_tools.sandbox import SandboxError
from conserve_tools.spec import Limits, Run, Spec, SpecError

logger = logging.getLogger("conserve.environments")

Tell = Callable[[Kind, str, dict[str, Any]], None]

# Commands that run at a time, each with up to a GiB by default, and those that may wait for one of
# them to end: one for each environment that there may be by default.
RUNNING, WAITING = 32, 256
# Environments that are prepared at a time. A setup command may take a core for minutes.
PREPARING = 4
# Environments of this many conversations at the head of the queue are prepared before these are
# bound.
NEAR = 4
# Results kept for clients that ask again.
_KEPT_RESULTS = 512
# Time to prepare an environment beyond its setup's limit; then clients are told to retry.
_PREPARING_S = 60.0


@dataclasses.dataclass(eq=False)
class Manager:
    """Prepares, runs and removes environments, as clients and the ledger ask.

    Args:
        ledger: with its predecessor's entries taken in.
        backends: the backend of each kind, or why there is none.
        tell: reports events by conversation id.
    """

    _settings: EnvironmentSettings
    ledger: Ledger
    _backends: Mapping[str, Backend | str]
    _tell: Tell

    def __post_init__(self) -> None:
        self._most = Limits.of(self._settings)
        self._threads = ThreadPoolExecutor(RUNNING + 2 * PREPARING + 4, "tools")
        self._free = asyncio.Semaphore(RUNNING)
        self._waiting = 0
        self.running = 0
        self._commands: dict[int, set[Running]] = {}
        self._results: OrderedDict[tuple[int, str], asyncio.Task[answers.CommandDone]] = (
            OrderedDict()
        )
        # Set when an environment is no longer declared or in preparation.
        self._settled: dict[int, asyncio.Event] = {}
        # By environments' numbers: each that is being prepared or removed has one.
        self._jobs: dict[int, asyncio.Task[None]] = {}

    # --- what clients ask for ----------------------------------------------------------------

    def declare(self, conversation_id: str, body: Any) -> answers.Environment:
        """Add an environment to a conversation, to be prepared when needed; raises `ApiError`."""
        try:
            spec = Spec.asked(body, self._most)
        except SpecError as error:
            raise ApiError(400, str(error), "invalid_environment", param=error.field) from None
        missing = self._backends[spec.kind]
        if isinstance(missing, str):
            raise ApiError(501, missing, "environment_not_supported", param="kind")
        try:
            return self._view(self.ledger.declare(conversation_id, spec, unix_s()))
        except Conflict as error:
            raise ApiError(409, str(error), "environment_exists") from None
        except QuotaExceeded as error:
            how = f", by the setting environments.{error.setting}" if error.setting else ""
            raise ApiError(
                429, f"{error}{how}", "too_many_environments", retry_after_s=30
            ) from None

    def listed(self, conversation_id: str) -> list[answers.Environment]:
        return [self._view(one) for one in self.ledger.of(conversation_id)]

    def shown(self, conversation_id: str, name: str) -> answers.Environment:
        """Return a conversation's environment; raises `ApiError` if there is none of that name."""
        return self._view(self._found(conversation_id, name))

    def let_go(self, conversation_id: str, name: str) -> None:
        """Release an environment, which goes with its last holder; raises `ApiError` if unknown."""
        self._found(conversation_id, name)
        self.ledger.let_go(conversation_id, name)
        self.step()

    async def run(self, conversation_id: str, name: str, body: Any) -> answers.CommandDone:
        """Run a command once its environment is ready and there is room; raises `ApiError`.

        Cancelling this ends it, unless it has a ``call_id``, by which its client may ask again.
        """
        one = self._found(conversation_id, name)
        try:
            run = Run.asked(body)
        except SpecError as error:
            raise ApiError(400, str(error), "invalid_command", param=error.field) from None
        if run.call_id is None:
            return await self._run(one, conversation_id, run)
        key = (one.number, run.call_id)
        task = self._results.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._run(one, conversation_id, run))
            # Read the error, as no request may be waiting for it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._results[key] = task
            while len(self._results) > _KEPT_RESULTS and next(iter(self._results.values())).done():
                self._results.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except ApiError:
            # A client that asks again has a refused command tried again.
            if self._results.get(key) is task:
                del self._results[key]
            raise

    async def _run(self, one: Environment, conversation_id: str, run: Run) -> answers.CommandDone:
        name = one.spec.name
        self.ledger.used(conversation_id, name, unix_s())
        self.step()
        await self._prepared(one, conversation_id)
        if self._waiting >= WAITING and self._free.locked():
            raise ApiError(
                429, f"{self._waiting} commands wait already", "too_many_commands", retry_after_s=5
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        self.running += 1
        began_s = time.monotonic()
        code: int | None = None
        try:
            outcome = await self._carry_out(one, run)
            code = outcome.exit_code
            return outcome
        except SandboxError as error:
            raise ApiError(500, str(error), "environment_broken") from None
        finally:
            self.running -= 1
            self._free.release()
            if (holder := one.holders.get(conversation_id)) is not None:
                holder.since_s = unix_s()
            wall_s = round(time.monotonic() - began_s, 4)
            # Clients themselves tell the table when an agent's tool begins and ends.
            said = {"environment": name, "state": "ran", "tool": run.tool}
            self._tell("environment", conversation_id, said | {"wall_s": wall_s, "exit_code": code})

    async def _carry_out(self, one: Environment, run: Run) -> answers.CommandDone:
        command = await self._blocking(self._backend(one).start, one, run)
        of_it = self._commands.setdefault(one.number, set())
        of_it.add(command)
        if one.state == "removing":  # And so it stays when it is removed.
            command.cut()
        waiting = asyncio.ensure_future(self._blocking(command.wait))
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            command.cut()
            with contextlib.suppress(SandboxError):
                await waiting
            raise
        finally:
            of_it.discard(command)
            if not of_it:
                self._commands.pop(one.number, None)

    async def _prepared(self, one: Environment, conversation_id: str) -> None:
        if one.state in ("declared", "preparing"):
            settled = self._settled.setdefault(one.number, asyncio.Event())
            try:
                async with asyncio.timeout(one.spec.limits.wall_s + _PREPARING_S):
                    await settled.wait()
            except TimeoutError:
                raise ApiError(
                    503, "the environment is not prepared yet; try again", "environment_not_ready",
                    retry_after_s=5,
                ) from None  # fmt: skip
        if one.state == "failed":
            raise ApiError(
                409,
                f"the environment could not be prepared ({one.error}); remove it, and ask for "
                "another",
                "environment_failed",
            )
        if one.state != "ready" or conversation_id not in one.holders:
            raise _unknown(one.spec.name)

    # --- what the ledger wants ---------------------------------------------------------------

    def step(self) -> None:
        """Start whatever the ledger wants done now."""
        for one in self.ledger.to_prepare(NEAR, PREPARING):
            self.ledger.preparing(one.number)
        for one in self.ledger:
            # If the outcome of a preparation could not be recorded, prepare again.
            if one.state == "preparing" and one.number not in self._jobs:
                self._begin(one, self._prepare(one))
        for one in self.ledger.to_remove():
            if one.number not in self._jobs:
                if one.state != "removing":
                    self.ledger.removing(one.number)
                self._begin(one, self._remove(one))

    def _begin(self, one: Environment, job: Coroutine[Any, Any, None]) -> None:
        task = self._jobs[one.number] = asyncio.get_running_loop().create_task(job)

        def over(done: asyncio.Task[None]) -> None:
            del self._jobs[one.number]
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.error("environment %d", one.number, exc_info=error)
            elif one.state not in ("declared", "preparing"):
                if (settled := self._settled.pop(one.number, None)) is not None:
                    settled.set()
                if not one.holders and one.state != "removing":
                    self.step()

        task.add_done_callback(over)

    async def _prepare(self, one: Environment) -> None:
        began_s = time.monotonic()
        try:
            ports = await self._blocking(self._backend(one).prepare, one)
        except (SandboxError, ApiError) as error:
            self.ledger.failed(one.number, str(error))
        else:
            self.ledger.ready(one.number, ports)
        took_s = round(time.monotonic() - began_s, 4)
        self._note(one, state=one.state, wall_s=took_s, error=one.error)

    async def _remove(self, one: Environment) -> None:
        for command in list(self._commands.get(one.number, ())):
            command.cut()
        try:
            await self._blocking(self._backend(one).remove, one)
        except (OSError, SandboxError, ApiError) as error:
            # The next step tries it again.
            logger.warning("environment %d cannot be removed yet: %s", one.number, error)
            return
        self.ledger.removed(one.number)
        for key in [key for key in self._results if key[0] == one.number]:
            if self._results[key].done():
                del self._results[key]
        said = {"environment": one.spec.name, "state": "removed"}
        self._tell("environment", one.last_holder, said)

    async def tidy(self) -> None:
        """Remove what a predecessor left behind; raises `OSError` or `SandboxError`."""
        kept = {one.number for one in self.ledger}
        for backend in self._backends.values():
            if not isinstance(backend, str):
                await self._blocking(backend.tidy, kept)

    async def close(self) -> None:
        for conversation_id in list(self.ledger.conversations()):
            for one in self.ledger.of(conversation_id):
                self.ledger.let_go(conversation_id, one.spec.name)
        for _ in range(3):
            self.step()
            while self._jobs:
                await asyncio.wait(list(self._jobs.values()))
        self._threads.shutdown(wait=False)

    # --- inside ------------------------------------------------------------------------------

    def _found(self, conversation_id: str, name: str) -> Environment:
        one = self.ledger.find(conversation_id, name)
        if one is None:
            raise _unknown(name)
        return one

    def _backend(self, one: Environment) -> Backend:
        backend = self._backends[one.spec.kind]
        if isinstance(backend, str):
            # An earlier manager had a backend of this kind.
            raise ApiError(501, backend, "environment_not_supported")
        return backend

    def _note(self, one: Environment, **details: Any) -> None:
        for conversation_id in list(one.holders):
            self._tell("environment", conversation_id, {"environment": one.spec.name, **details})

    async def _blocking(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _view(self, one: Environment) -> answers.Environment:
        backend = self._backends[one.spec.kind]
        return answers.Environment(
            id=one.spec.name,
            state=one.state,
            kind=one.spec.kind,
            image=one.spec.image,
            isolation=None if isinstance(backend, str) else backend.isolation,
            ports=[*one.ports],
            shared=one.spec.shared,
            holders=len(one.holders),
            limits=answers.EnvironmentLimits(**one.spec.limits.model_dump()),
            error=one.error,
        )


def _unknown(name: str) -> ApiError:
    return ApiError(
        404,
        f"the conversation has no environment {name[:64]!r}; it was never asked for, or has ended",
        "environment_not_found",
    )
