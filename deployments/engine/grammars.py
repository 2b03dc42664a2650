"""Bounds what a request's schema or grammar may cost: another process compiles it first.

vLLM 0.32 makes a grammar of a schema on the event loop that passes on all tokens, without a bound:
``{"pattern": "^.{1,9999}$"}`` takes it six seconds. Here each grammar is compiled once in a process
that can be ended (`grammar_process`). An engine gets only what that process has compiled in time,
and compiles it in a thread of its core.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import re
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    has_xgrammar_unsupported_json_features,
)
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from deployments.engine import grammar_process
from deployments.engine.turns import refuse_check
from deployments.upstream import unbounded_grammars
from deployments.upstream.patch import require

# Grammars whose problem, or that they have none, is kept.
_MOST_KNOWN = 4096
# The process takes 270 MB, and starts again in two seconds.
_IDLE_S = 300.0
# For the process to start and to compile, after others' grammars, on a busy machine.
_WAIT_S = 120.0
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class Grammars:
    """Judges the structured outputs of one engine's requests, each grammar once.

    Args:
        config: the engine's ``VllmConfig``.
        tokenizer: the model's; None: vLLM refuses structured outputs.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._backend = config.structured_outputs_config.backend
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = asyncio.Lock()
        self._last: asyncio.Future[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        # Schemas that xgrammar refuses and guidance takes.
        self._unfit: set[str] = set()

    def bound(self, client: Any) -> None:
        """Have an ``AsyncLLM`` judge each grammar before it is vLLM's turn."""
        if self._tokenizer is None or self._backend not in ("auto", "xgrammar"):
            return
        require(unbounded_grammars.PATCH)
        unbounded_grammars.trust_judged(self._unfit.__contains__)
        generate = client.generate

        @functools.wraps(generate)
        def bounded(prompt: Any, sampling_params: Any, *given: Any, **more: Any) -> Any:
            ask = functools.partial(generate, prompt, sampling_params, *given, **more)
            outputs = getattr(sampling_params, "structured_outputs", None)
            if outputs is None or outputs.all_constraints_none():
                return ask()
            return _once_judged(self.judge(outputs), ask)

        client.generate = bounded

    async def judge(self, outputs: StructuredOutputsParams) -> None:
        """Return once a grammar is known to be compiled in time.

        Raises:
            VLLMValidationError: it is wrong, or takes too long, too much memory or too long a step.
        """
        if calls := getattr(outputs, "calls", None):
            await self.judge(calls)  # They may come instead, by the patch `uncallable_tools`.
        if outputs.json_object:
            return
        kind, text = _grammar_of(outputs)
        key = hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
        if key not in self._known:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S), self._lock:
                    # A compilation goes on when its client leaves: the process answers in order.
                    if self._last is not None:
                        await asyncio.wait([self._last])
                    if key not in self._known:
                        self._last = asyncio.ensure_future(self._learn(key, kind, text))
                        await asyncio.shield(self._last)
            if key not in self._known:
                raise VLLMValidationError(
                    "the grammar was not compiled in time, as others came first; try again later"
                )
        self._known.move_to_end(key)
        if (problem := self._known[key]) is not None:
            raise VLLMValidationError(problem)

    async def _learn(self, key: bytes, kind: str, text: str) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                self._known[key] = await self._problem(kind, text)
        except TimeoutError:
            self._end()  # The process hangs: its CPU time is bounded, too.
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    async def _problem(self, kind: str, text: str) -> str | None:
        if kind != "json":
            return await self._compiled(kind, text)
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"the schema is no JSON: {error}"
        if not has_xgrammar_unsupported_json_features(schema):
            problem = await self._compiled(kind, text)
            final = problem in (None, grammar_process.NO_TEXT) or self._process is None
            if final or self._backend != "auto":
                return problem
        elif "patternProperties" in text:
            # What vLLM would take for it compiles without a bound.
            return "patternProperties: it is not served beside other keywords; leave it out"
        self._unfit.add(unbounded_grammars.name_of(schema))
        return await self._compiled("guidance", text)

    async def _compiled(self, kind: str, text: str) -> str | None:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        if self._idle is not None:
            self._idle.cancel()
        # uvloop has a RuntimeError for a process that has ended.
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            await process.stdin.drain()
        if answer := await process.stdout.readline():
            self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._end)
            problem: str | None = json.loads(answer)
            return problem
        self._process = None
        status = await process.wait()
        most = f"more than {grammar_process.MOST_CPU_S:g} s" if status == -signal.SIGPROF else (
            "too much memory")  # fmt: skip
        return f"{_costliest(kind, text)}: it takes {most} to compile; make it simpler"

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", grammar_process.__name__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        told = await asyncio.to_thread(self._compiler)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        return self._process

    def _compiler(self) -> dict[str, Any]:
        vocab_size = self._config.model_config.get_vocab_size()
        backend = XgrammarBackend(self._config, self._tokenizer, vocab_size)
        plain = backend.disable_any_whitespace
        tokenizer = backend.compiler.compile_regex("a").tokenizer_info.serialize_json()
        spaces = {"any_whitespace": not plain, "separators": [",", ":"] if plain else None}
        return {"tokenizer": tokenizer, "whitespace": spaces}

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None


async def _once_judged(
    judged: Awaitable[None], ask: Callable[[], AsyncIterator[Any]]
) -> AsyncIterator[Any]:
    try:
        await judged
    except VLLMValidationError as error:
        refuse_check(error)
        raise
    async with aclosing(ask()) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            yield output


def _grammar_of(outputs: StructuredOutputsParams) -> tuple[str, str]:
    """Return the kind and the text of what an engine compiles, as vLLM does."""
    if outputs.choice is not None:
        return "grammar", choice_as_grammar(outputs.choice)
    option, text = get_structured_output_key(outputs)
    kind = option.name.lower()
    return ("lark" if kind == "grammar" and grammar_is_likely_lark(text) else kind), text


def _costliest(kind: str, text: str) -> str:
    """Return the keyword that probably takes longest to compile, with its place in a schema."""
    try:
        document = json.loads(text)
    except ValueError:
        return kind
    return max(_costs(document, ""), default=(0.0, kind))[1]


def _costs(schema: Any, place: str) -> Iterator[tuple[float, str]]:
    """Yield a rough cost of each keyword that can be dear."""
    if isinstance(schema, list):
        for at, one in enumerate(schema):
            yield from _costs(one, f"{place}[{at}]")
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        here = f"{place}.{name}".lstrip(".")
        if name == "pattern" and isinstance(value, str):
            counts = (int(most or least or 1) for least, most in _COUNT.findall(value))
            yield len(value) + math.prod(max(count, 1) for count in counts), here
        elif name in ("properties", "enum", "anyOf", "oneOf") and isinstance(value, dict | list):
            yield len(value) ** 2 / 16, here
        elif name in ("minLength", "maxLength", "minItems", "maxItems") and isinstance(value, int):
            yield value / 1024, here
        yield from _costs(value, here)
