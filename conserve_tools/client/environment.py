"""An environment on the server, as a client has it."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import httpx

# For a command's wait before it runs, and for its answer's way back.
_MARGIN_S = 120.0
_LONGEST_S = 86_400.0
# The attempts take most of a minute in all, in which a lost part of the server is restarted.
_ATTEMPTS = 10
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0


class EnvironmentRefused(RuntimeError):
    """The server refuses a request; the message is the server's, ``code`` is for programs."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A finished command.

    Attributes:
        truncated: whether some of the outputs is missing.
        reason: why the server has ended it, if it has.
        isolation: what separated it from the rest of the server's machine.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool
    timed_out: bool
    reason: str | None
    wall_s: float
    isolation: str

    @property
    def output(self) -> str:
        parts = [self.stdout, self.stderr]
        if self.truncated:
            parts.append("(the rest is left out)")
        if self.reason:
            parts.append(f"(ended: {self.reason})")
        elif self.exit_code:
            parts.append(f"(exit code {self.exit_code})")
        return "\n".join(part.rstrip("\n") for part in parts if part)


class Environment:
    """A conversation's environment; `Agent.environment` makes it."""

    def __init__(self, http: httpx.Client, path: str) -> None:
        self._http = http
        self._path = path

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        tool: str = "run",
    ) -> CommandResult:
        """Run a command; the first one waits until the environment is prepared.

        If the connection breaks, the result is asked for again, and the command is not run twice.
        ``timeout_s`` None means the environment's limit.

        Raises:
            EnvironmentRefused: it is not run, or it was cut since the server's manager was
                restarted (``command_cut``).
            httpx.HTTPError: the server does not answer.
        """
        body: dict[str, Any] = {
            "command": command if isinstance(command, str) else list(command),
            "stdin": stdin,
            "tool": tool,
            "call_id": uuid.uuid4().hex,
        }
        if timeout_s is not None:
            body["timeout_s"] = timeout_s
        longest_s = (_LONGEST_S if timeout_s is None else timeout_s) + _MARGIN_S
        said = asked(self._http, "POST", f"{self._path}/run", body, longest_s)
        return CommandResult(**{field.name: said[field.name] for field in fields(CommandResult)})

    def state(self) -> dict[str, Any]:
        """Return its state, ports and limits, as the server reports them."""
        return asked(self._http, "GET", self._path)

    def ports(self) -> list[int]:
        return list(self.state()["ports"])

    def remove(self) -> None:
        asked(self._http, "DELETE", self._path)


def asked(
    http: httpx.Client, method: str, path: str, body: Any = None, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Return the server's answer; retry while it cannot be reached or is busy."""
    pause_s = _FIRST_PAUSE_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            answer = http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TransportError:
            if attempt == _ATTEMPTS:
                raise
        else:
            if answer.is_success:
                found: dict[str, Any] = answer.json()
                return found
            message, code = said_by(answer)
            again = answer.status_code in (429, 502, 503, 504) and code != "command_cut"
            if not again or attempt == _ATTEMPTS:
                raise EnvironmentRefused(answer.status_code, message, code)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise AssertionError


def said_by(answer: httpx.Response) -> tuple[str, str | None]:
    """Return the message and the code of an error."""
    try:
        error = answer.json()["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}", None
