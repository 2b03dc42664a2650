"""A peer as data: the options that all of them share, and its processes (`running` runs them)."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from conserve import engines
from conserve.settings import EMBEDDED_MODEL, LMCacheSettings, Settings, SettingsError, load
from conserve_lab import machine
from deployments.node.lmcache_server import free_port as free_listening_port
from hetero.container import cpu_dtype

# What `conserve bench` sends by itself. A peer that can be told a name is told this one.
CONVERSATION_HEADER = "X-Conversation-Id"
# The paper fixes its per-turn baseline's rate of wrong decisions at this (section 5.1).
DEFAULT_WRONG_DECISION_RATE = 0.1

_given: set[int] = set()


@dataclass(frozen=True)
class Options:
    """Options of a start. ValueError says which value is not usable, and why.

    Attributes:
        engines: engine replicas in all. Systems that disaggregate have one prefiller of them.
        model: path or Hugging Face id; ``embedded`` needs no download.
        engine: vLLM engine arguments, over the defaults of `engine_arguments`.
        cores: one CPU core an engine, to which its processes are pinned; None: not pinned.
        device: ``auto`` is ``gpu`` where NVIDIA's driver has a GPU.
        logs: folder for logs; None: a temporary one.
        wrong_decision_rate: share of later turns sent to a prefiller (``per_turn`` alone).
        chunk_tokens: most tokens of a step (``collocated`` alone); None: the device's default.
        host_gib: host memory for KV, of the systems that have some.
        timeout_s: longest wait for the peer to be up and warm.
    """

    engines: int = 2
    model: str = EMBEDDED_MODEL
    engine: Mapping[str, Any] = field(default_factory=dict)
    port: int = 8000
    cores: tuple[int, ...] | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    logs: Path | None = None
    wrong_decision_rate: float = DEFAULT_WRONG_DECISION_RATE
    chunk_tokens: int | None = None
    host_gib: float = LMCacheSettings().size_gb
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= 1024:
            raise ValueError(f"engines: {self.engines} is not from 1 to 1024")
        if not 1024 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not from 1024 to 65535")
        if not 0 <= self.wrong_decision_rate <= 1:
            raise ValueError(f"wrong_decision_rate: {self.wrong_decision_rate} is not from 0 to 1")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} is not positive")
        if self.host_gib <= 0:
            raise ValueError(f"host_gib: {self.host_gib:g} is not positive")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s: {self.timeout_s:g} is not positive")
        if self.device not in ("auto", "cpu", "gpu"):
            raise ValueError(f"device: {self.device!r} is not auto, cpu or gpu")
        if self.cores is not None:
            _check_cores(self.cores, self.engines)
        try:
            self._settings()
        except SettingsError as error:
            raise ValueError(" ".join(str(error).split())) from None
        try:
            json.dumps(dict(self.engine))
        except TypeError as error:
            raise ValueError(f"engine: {error}") from None

    @property
    def gpu(self) -> bool:
        return bool(machine.gpu_names()) if self.device == "auto" else self.device == "gpu"

    @property
    def served_model(self) -> str:
        """The name under which every peer serves the model: the one that ConServe gives it."""
        return self._settings().model_id

    @property
    def model_source(self) -> str:
        return engines.model_source(self.model)

    def _settings(self) -> Settings:
        return load({"model": self.model, "engine": dict(self.engine)})


def _check_cores(cores: tuple[int, ...], engines: int) -> None:
    # Where this process may run, its children may.
    usable = os.sched_getaffinity(0)
    if len(set(cores)) != engines:
        raise ValueError(f"cores: {len(set(cores))} different ones for {engines} engines")
    if missing := set(cores) - usable:
        raise ValueError(f"cores: {sorted(missing)} are not among {sorted(usable)}")


def server_command(
    source: str, served_model: str, port: int, arguments: Mapping[str, Any]
) -> list[str]:
    """Return the command line of vLLM's own OpenAI server on loopback: an engine without ConServe.

    It runs the module, since ``vllm serve`` requires a distribution named ``vllm``, which the CPU
    build is not. It needs the environment of `engine_environment`.
    """
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", source, "--served-model-name", served_model),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
        *engines.flags(arguments),
    ]


def engine_arguments(options: Options) -> dict[str, Any]:
    """Return vLLM's arguments for every engine of every peer: those of ConServe's own engines."""
    return {
        **engines.engine_arguments(options.model, options.gpu),
        **({} if options.gpu else {"dtype": cpu_dtype()[0]}),
        "enable_prefix_caching": True,
        **options.engine,
    }


def engine_environment(options: Options) -> dict[str, str]:
    return engines.engine_environment(options.model, options.gpu)


@dataclass(frozen=True)
class Part:
    """A process of a peer, with variables on top of this process's own.

    ``ready_url`` answers 200 when the next part may start. The last part is ready when it lists the
    model.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None


@dataclass(frozen=True)
class PeerPlan:
    """A peer's processes, in the order in which they start; the last one serves.

    Attributes:
        engine_arguments: vLLM's arguments, by role.
        prefillers, decoders: engines that only prefill, and the others.
        session_header: the request header by which it tells conversations apart, if it does.
        releases: whether it wants to be told when a conversation has ended, as ConServe does.
        min_tokens: whether it takes requests with ``min_tokens``.
    """

    parts: tuple[Part, ...]
    engine_arguments: Mapping[str, Mapping[str, Any]]
    prefillers: int
    decoders: int
    session_header: str | None = CONVERSATION_HEADER
    releases: bool = False
    min_tokens: bool = True

    @property
    def engines(self) -> int:
        return self.prefillers + self.decoders


class PeerUnavailable(RuntimeError):
    """A peer cannot run here; the message is one line with the reason."""


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def free_port() -> int:
    """Return a port on loopback that is free, and was not given to another part before.

    It is not one that the system hands out: a part binds it many seconds later, and by then an
    outgoing connection could have it, or the next caller.
    """
    port = free_listening_port("127.0.0.1", _given)
    _given.add(port)
    return port


def require_two(engines: int, name: str) -> None:
    """Refuse to disaggregate a single engine, with `PeerUnavailable`."""
    if engines < 2:
        raise PeerUnavailable(f"{name} needs a prefiller and a decoder: set engines to 2 or more")
