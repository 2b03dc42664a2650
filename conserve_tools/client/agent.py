"""An agent: one conversation with the server, from its beginning to its end."""

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import openai

from conserve_tools.client.environment import Environment, EnvironmentRefused, asked, said_by
from conserve_tools.client.tools import Tool

logger = logging.getLogger("conserve_tools.client")

Message = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

_HEADER = "X-Conversation-Id"
_TIMEOUT_S = 600.0
_CONNECT_S = 10.0
# Reports hold up the agent's work for no longer.
_REPORT_S = 5.0


class Agent:
    """A conversation, as a context manager: on exit, what it has on the server is removed.

    Args:
        url: of the server, without a path.
        conversation: its id; None means a new one.
        key: an API key, if the server wants one.
        max_retries: how often the ``openai`` client retries a request that was cut.
    """

    def __init__(
        self,
        url: str,
        conversation: str | None = None,
        *,
        key: str | None = None,
        max_retries: int = 5,
    ) -> None:
        self.conversation = conversation or f"agent-{uuid.uuid4().hex}"
        self.tools: dict[str, Tool] = {}
        url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        )
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=key or "unused",
            default_headers={_HEADER: self.conversation},
            max_retries=max_retries,
            timeout=_TIMEOUT_S,
        )
        self._path = f"/v1/conversations/{quote(self.conversation, safe='')}"
        self._reports = True
        self._model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the conversation and remove its environments; failures are logged.

        A server that does not answer ends it by itself, after its idle time.
        """
        try:
            # The server does not know a conversation that has not begun, so name its environments.
            for one in self._environments():
                with contextlib.suppress(Exception):
                    asked(self._http, "DELETE", f"{self._path}/environments/{one}", None, _REPORT_S)
            asked(self._http, "DELETE", self._path)
        except (httpx.HTTPError, EnvironmentRefused) as error:
            if isinstance(error, EnvironmentRefused) and error.status == 404:
                return  # It has ended, or has never begun.
            logger.warning("conversation %s could not be ended: %s", self.conversation, error)
        finally:
            self._http.close()
            self.openai.close()

    def _environments(self) -> list[str]:
        try:
            answer = asked(self._http, "GET", f"{self._path}/environments", None, _REPORT_S)
        except EnvironmentRefused:
            return []  # This server has none.
        return [one["id"] for one in answer["data"]]

    def environment(self, name: str = "main", **asked_for: Any) -> Environment:
        """Get an environment; the server prepares it when the conversation needs it soon.

        Args:
            asked_for: ``ports``, ``setup``, ``limits``, ``kind``, ``image``, ``shared``: see
                docs/guides/environments.md.

        Raises:
            EnvironmentRefused: it cannot be had here; says why.
        """
        path = f"{self._path}/environments"
        asked(self._http, "POST", path, {"name": name, **asked_for})
        return Environment(self._http, f"{path}/{quote(name, safe='')}")

    def tool(self, function: _Function) -> _Function:
        """Let the model call a function; a decorator. TypeError if a parameter has no name."""
        made = Tool.of(function)
        self.tools[made.name] = made
        return function

    def call(self, name: str, arguments: str, call_id: str | None = None) -> str:
        """Carry out a model's call of a tool, and return what to tell the model."""
        tool = self.tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; there are {', '.join(self.tools) or 'none'}"
        call = {"tool": name, "call_id": call_id or uuid.uuid4().hex}
        self.report("start", **call)
        began_s = time.monotonic()
        try:
            return tool.call(arguments)
        finally:
            self.report("end", **call, wall_s=round(time.monotonic() - began_s, 4))

    def report(self, event: str, **details: Any) -> None:
        """Tell the server that a tool starts or ends, for its scheduling.

        If the server does not take reports, it gets no more.
        """
        if not self._reports:
            return
        said = {"event": event, **details}
        try:
            answer = self._http.post(f"{self._path}/tools", json=said, timeout=_REPORT_S)
        except httpx.HTTPError as error:
            logger.info("a tool's %s is not reported: %s", event, error)
            return
        # A 404 may also mean that the conversation has not begun.
        if answer.status_code in (404, 405) and said_by(answer)[1] != "conversation_not_found":
            self._reports = False
            logger.info("this server does not take reports of tools")

    def run(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        max_turns: int = 20,
        **options: Any,
    ) -> str:
        """Have the model work with the tools until it answers without a call.

        Returns the answer, or an empty text if it was stopped after ``max_turns``. ``options`` go
        to ``chat.completions.create``, which may raise openai.OpenAIError.
        """
        if model is None:
            self._model = model = self._model or self.openai.models.list().data[0].id
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        history: list[Any] = [dict(message) for message in messages]
        if self.tools:
            options = {"tools": [tool.schema for tool in self.tools.values()], **options}
        for _ in range(max_turns):
            reply = self.openai.chat.completions.create(model=model, messages=history, **options)
            message = reply.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for asked_for in message.tool_calls:
                function = getattr(asked_for, "function", None)
                if function is None:
                    result = "error: only functions can be called"
                else:
                    result = self.call(function.name, function.arguments, asked_for.id)
                history.append({"role": "tool", "tool_call_id": asked_for.id, "content": result})
        return ""
