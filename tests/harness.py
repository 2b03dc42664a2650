"""Real applications for tests, one at a time, and small clients to talk to them."""

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from conserve.engines import engine_environment, model_source, server_command
from conserve.launch import Launch, LaunchError, require_free
from conserve.settings import EMBEDDED_MODEL

Message = dict[str, Any]

# A minute on a free machine; a shared one may take many.
START_S = 1200.0
URL = "http://127.0.0.1:8000"
LONE_PORT = 8190
TIMEOUT_S = 180.0
_WORDS = (
    *("open", "close", "read", "write", "file", "class", "return", "import", "value", "index"),
    *("print", "while", "yield", "token", "block", "cache", "decoder", "turn", "prompt", "answer"),
    *("agent", "tool", "result", "error", "count", "length", "prefix", "batch", "step", "open"),
)

# float32, so that batches of different sizes do not change which token is the most likely. And
# LMCache makes sure of all its memory when it starts.
_COMMON = ("engine.dtype=float32", "lmcache.size_gb=0.5")
DRAIN_S = 40
CONFIGURATIONS = {
    "main": (*_COMMON, "decoders=2"),
    # One decoder that is full soon, a short queue, and conversations that end by themselves.
    "small": (
        *_COMMON,
        "decoders=1",
        "engine.max_model_len=2048",
        "decoders.engine.num_gpu_blocks_override=24",
        "queue_limit=2",
        "queue_timeout_s=5",
        "idle_timeout_s=15",
        "max_body_bytes=100000",
    ),
    # One decoder to begin with, and each is full soon.
    "scaling": (
        *_COMMON,
        "decoders=1",
        "decoders.max_replicas=3",
        "prefillers.num_cpus=0.1",
        "decoders.num_cpus=0.1",
        "engine.max_model_len=2944",
        "decoders.engine.num_gpu_blocks_override=24",
        "queue_timeout_s=900",
        "autoscaling.window_s=6",
        "autoscaling.down_delay_s=5",
        "autoscaling.cool_down_s=5",
        f"autoscaling.drain_timeout_s={DRAIN_S}",
    ),
    # One prefiller to begin with, and bursts of prompts are soon too much for it.
    "bursts": (
        *_COMMON,
        "profile=cpu-embedded",
        "prefillers.max_replicas=2",
        "decoders=1",
        "prefillers.num_cpus=0.1",
        "autoscaling.window_s=4",
    ),
}
# Several of what the others have one of, started from a file, as `serve deploy` would.
_WIDE = """
proxy_location: Disabled
applications:
  - name: default
    import_path: conserve:app
    args:
      routers: 2
      prefillers: {replicas: 2, num_cpus: 0.1}
      decoders: {replicas: 1, num_cpus: 0.1}
      min_remote_prefill_tokens: 200
      engine: {dtype: float32}
      lmcache: {size_gb: 0.5}
"""
_ENGINES = {"main": (1, 2), "small": (1, 1), "wide": (2, 1), "scaling": (1, 1), "bursts": (1, 1)}


class Stage:
    """The application that runs now; another configuration replaces it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._name: str | None = None
        self._launch: Launch | None = None
        self._lone: Launch | None = None

    def use(self, name: str) -> str:
        """Have this configuration running, all engines ready; returns its URL."""
        if self._name != name:
            self.clear()
            require_free(URL)
            launch = self._launch_of(name)
            launch.__enter__()
            self._launch = launch
            if name == "main":
                self._lone = lone_engine(self._logs / "lone.log")
            self._name = name
        self.wait_until_whole()
        return URL

    def _launch_of(self, name: str) -> Launch:
        log = self._logs / f"{name}.log"
        if name != "wide":
            return Launch(CONFIGURATIONS[name], log)
        file = self._logs / "conserve.yaml"
        file.write_text(_WIDE)
        return Launch([], log, None, [sys.executable, "-m", "ray.serve.scripts", "run", str(file)])

    def wait_until_whole(self, timeout_s: float = START_S) -> None:
        """Return when every engine of the configuration is ready."""
        assert self._launch is not None
        assert self._name is not None
        self._launch.wait_until_serving(URL, *_ENGINES[self._name], timeout_s=timeout_s)

    def clear(self) -> None:
        """Stop what runs; fails if a process of it is left."""
        for launch in (self._lone, self._launch):
            if launch is not None:
                launch.stop()
        self._launch = self._lone = self._name = None
        require_none_left()

    def wait_for_lone(self) -> None:
        """Return when the lone engine answers."""
        assert self._lone is not None
        wait_for_lone(self._lone, self._logs)


def lone_engine(log: Path) -> Launch:
    """vLLM's own server on the same model, without ConServe: what outputs are compared with."""
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 16384}
    command = server_command(
        model_source(EMBEDDED_MODEL), "conserve-embedded", LONE_PORT, arguments
    )
    environment = engine_environment(EMBEDDED_MODEL, gpu=False)
    launch = Launch([], log, environment, command)
    launch.__enter__()
    return launch


def wait_for_lone(lone: Launch, logs: Path) -> None:
    """Return when a lone engine answers."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{LONE_PORT}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if not lone.running or time.monotonic() > deadline_s:
            raise LaunchError(f"the lone engine did not start; see {logs}/lone.log")
        time.sleep(0.5)


def text(rng: random.Random, words: int) -> str:
    """Prose of about so many tokens, different for every draw."""
    return " ".join(rng.choice(_WORDS) for _ in range(words))


@dataclass
class Reply:
    """A turn's outcome as a client has it."""

    status: int
    headers: httpx.Headers
    body: Any
    content: str = ""

    @property
    def conversation(self) -> str:
        return str(self.headers["x-conversation-id"])

    @property
    def decoder(self) -> str:
        return str(self.headers["x-conserve-decoder"])


@dataclass
class Agent:
    """A client that keeps a conversation's messages and echoes answers as it got them."""

    client: httpx.AsyncClient
    id: str | None = None
    messages: list[Message] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    stats: list[dict[str, int]] = field(default_factory=list)

    async def say(self, content: str, *, tokens: int = 24, stream: bool = False) -> Reply:
        """Append a message, have it answered, append the answer; fails on any error."""
        self.messages.append({"role": "user", "content": content})
        reply = await self.ask(tokens=tokens, stream=stream)
        assert reply.status == 200, reply.body
        self.messages.append({"role": "assistant", "content": reply.content})
        self.replies.append(reply)
        self.stats.append(await last_turn(self.client, reply.conversation))
        return reply

    async def ask(self, *, tokens: int = 24, stream: bool = False, **options: Any) -> Reply:
        """Send the messages as they are; options as ``chat`` has them."""
        return await chat(
            self.client, self.messages, self.id, tokens=tokens, stream=stream, **options
        )


async def chat(
    client: httpx.AsyncClient,
    messages: Sequence[Message],
    name: str | None = None,
    *,
    tokens: int = 24,
    stream: bool = False,
    url: str = URL,
    headers: dict[str, str] | None = None,
    began: asyncio.Event | None = None,
    **options: Any,
) -> Reply:
    """One greedy chat completion; ``began`` is set by the first event of a stream."""
    body = {
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        # A test that asks for a long answer means it to last.
        "ignore_eos": tokens > 100,
        "stream": stream,
        "model": "conserve-embedded",
        **options,
    }
    sent = dict(headers or {})
    if name is not None:
        sent["X-Conversation-Id"] = name
    if not stream:
        response = await client.post(url + "/v1/chat/completions", json=body, headers=sent)
        parsed = response.json()
        content = ""
        if response.status_code == 200:
            content = parsed["choices"][0]["message"]["content"] or ""
        return Reply(response.status_code, response.headers, parsed, content)
    parts = []
    async with client.stream(
        "POST", url + "/v1/chat/completions", json=body, headers=sent
    ) as response:
        events = []
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                events.append(event)
                if began is not None:
                    began.set()
                parts += [
                    choice["delta"].get("content") or "" for choice in event.get("choices", [])
                ]
        return Reply(response.status_code, response.headers, events, "".join(parts))


async def last_turn(client: httpx.AsyncClient, conversation_id: str) -> dict[str, int]:
    """What the engine reported of a conversation's last turn."""
    response = await client.get(f"{URL}/v1/conversations/{conversation_id}")
    assert response.status_code == 200, response.text
    stats: dict[str, int] = response.json()["last_turn"]
    return stats


async def lone_answer(client: httpx.AsyncClient, messages: Sequence[Message], tokens: int) -> str:
    """What the lone engine answers to the same messages."""
    reply = await chat(client, messages, tokens=tokens, url=f"http://127.0.0.1:{LONE_PORT}")
    assert reply.status == 200, reply.body
    return reply.content


def new_client() -> httpx.AsyncClient:
    """A client with room for many requests at a time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits)


def engines(role: str | None = None) -> list[dict[str, Any]]:
    """Engines alive, as ``GET /v1/engines`` has them."""
    data: list[dict[str, Any]] = httpx.get(URL + "/v1/engines", timeout=30).json()["data"]
    return [engine for engine in data if role is None or engine["role"] == role]


def exposed(url: str) -> str:
    """The Prometheus text of the application, or of an engine."""
    return httpx.get(url + "/metrics", timeout=30).text


def metric(name: str, text: str | None = None, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels."""
    text = text if text is not None else exposed(URL)
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


def release_all() -> None:
    """End every live conversation."""
    listed = httpx.get(URL + "/v1/conversations?limit=10000", timeout=30).json()["data"]
    for conversation in listed:
        httpx.delete(f"{URL}/v1/conversations/{conversation['id']}", timeout=30)


def processes(pattern: str, below: int | None = None) -> list[psutil.Process]:
    """The processes below this one, or that one, whose command line matches; none if it is gone."""
    found = []
    try:
        descendants = psutil.Process(below).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for process in descendants:
        try:
            if re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def require_none_left() -> None:
    """Fails if a process still runs below this one.

    Those that have ended and that nobody waits for do not count: Ray, once imported, makes this
    process the parent of orphans.
    """
    left = [str(process) for process in processes("")]
    assert not left, f"left behind: {left}"


def kill(pid: int) -> None:
    """``kill -9``, and the process is gone."""
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline_s, f"{pid} outlives its kill"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def eventually(what: str, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition; fails, naming it, if it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.2)
