"""What an engine is asked for, and says, where nobody wants a turn's answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from conserve import wire
from conserve.apis import COUNT_TOKENS, MESSAGES
from conserve.turn import TurnStats
from deployments.engine.stored import tell_stored
from deployments.engine.turns import skip_media_cache
from deployments.messages import Checked
from tests.unit.deployments.asgi import exchange, receiver, scope_of
from tests.unit.deployments.engine.following import engine_turns

PROMPT = [1, 2, 3]
# As a turn may want its output.
WANTED = SamplingParams(
    n=3, max_tokens=90, logprobs=2, structured_outputs=StructuredOutputsParams(json_object=True)
)


@dataclass
class Engine:
    """Stands in for vLLM's ``AsyncLLM``, its renderer and its HTTP app.

    Attributes:
        images: what `process_inputs` makes of the prompt's.
        fails: what becomes of a prompt that is computed.
        ran: the parameters of what was computed.
        stored: where its worker told that prompts are stored, for which their answers wait.
        closed: how many outputs were given up.
    """

    # Each one's identifier; the second is on the node already.
    images: list[str] | None = None
    fails: Exception | None = None
    hangs: bool = False
    prompts: int = 1
    stores: bool = True
    ran: list[Any] = field(default_factory=list)
    stored: list[Any] = field(default_factory=list)
    closed: int = 0
    skipped: list[bool] = field(default_factory=list)
    shown: list[RequestOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.input_processor = self
        skip_media_cache(self)
        missing = {"missing_tokens": lambda images: 16 * ("new" in dict(images))}
        self.turns = engine_turns(self.app, self, stores=self.stores, **missing)

    def process_inputs(self, *asked: Any, **options: Any) -> Any:
        features = self.images and [
            SimpleNamespace(identifier=one, mm_position=None) for one in self.images
        ]
        return SimpleNamespace(prompt_token_ids=PROMPT, mm_features=features)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        self.ran.append((params, options))
        told = (params.extra_args or {}).get("kv_transfer_params", {})
        if (address := told.pop(wire.STORED_TO, None)) is not None:
            tell_stored(address, workers=1)
            self.stored.append(address)
        try:
            if self.fails is not None:
                raise self.fails
            if self.hangs:
                await asyncio.Event().wait()
            yield RequestOutput(
                request_id, None, PROMPT, None, [CompletionOutput(0, "x", [7], None, None)], True,
                num_cached_tokens=2,
                kv_transfer_params={"cached_token_stats": {"num_lmcache_extra_cached_tokens": 1}},
                ec_transfer_params={wire.ENCODED: [1, 16, 2]} if self.images else None,
            )  # fmt: skip
        finally:
            self.closed += 1

    async def render_chat(self, *, skip_mm_cache: bool = False) -> None:
        self.skipped.append(skip_mm_cache)

    render_completion = preprocess_chat = render_chat

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.render_chat()
        for number in range(self.prompts):
            async for output in self.generate({}, WANTED, f"r{number}", priority=1):
                self.shown.append(output)
        await JSONResponse({"served": scope["path"]})(scope, receive, send)


def ask(engine: Engine, path: str) -> tuple[int, Any]:
    """Status and body of the answer."""
    start, body = exchange(engine.turns, b"{}", method="POST", path=path)
    return start["status"], json.loads(body["body"])


def read(answer: Any) -> TurnStats:
    return msgspec.convert(answer, TurnStats)


@pytest.mark.parametrize(
    ("images", "encodes"), [(None, 0), ([], 0), (["known"], 0), (["known", "new"], 16)]
)
def test_a_check_computes_nothing_and_says_what_images_would_take(
    images: list[str] | None, encodes: int
) -> None:
    engine = Engine(images)
    status, answer = ask(engine, wire.CHECK_PREFIX + "/v1/chat/completions")
    assert (status, Checked(**answer)) == (200, Checked([PROMPT], bool(images), encodes))
    assert engine.ran == []
    assert engine.skipped == [True]


def test_a_prefill_computes_the_prompt_and_nothing_of_what_the_turn_wants() -> None:
    engine = Engine()
    status, answer = ask(engine, wire.PREFILL_PREFIX + "/v1/chat/completions")
    assert (status, read(answer)) == (
        200,
        TurnStats(prefilled_tokens=3, prefiller_lmcache_tokens=1, prefiller_cached_tokens=2),
    )
    ((params, options),) = engine.ran
    assert (params.n, params.max_tokens, params.temperature) == (1, 1, 0)
    assert params.structured_outputs is params.logprobs is None
    assert params.extra_args == {"kv_transfer_params": wire.transfer_params(park=True)}
    assert options == {"priority": 1}
    assert len(engine.stored) == 1
    # What the engine is sent, its core has to be sent too.
    assert engine.skipped == [False]
    assert engine.closed == 1


def test_an_engine_that_only_encodes_stores_no_prompt() -> None:
    """An answer to a prompt that is stored waits until it is."""
    engine = Engine(stores=False)
    status, answer = ask(engine, wire.PREFILL_PREFIX + "/v1/chat/completions")
    assert (status, answer["prefilled_tokens"]) == (200, 3)
    ((params, _),) = engine.ran
    assert params.extra_args is None


def test_a_prefill_ends_as_vllm_wants_each_api_to_end() -> None:
    for path, choices in (("/v1/chat/completions", 0), (MESSAGES, 1)):
        engine = Engine()
        ask(engine, wire.PREFILL_PREFIX + path)
        (output,) = engine.shown
        assert output.finished
        assert [choice.text for choice in output.outputs] == [""] * choices


def test_several_prompts_are_one_prefill() -> None:
    engine = Engine(prompts=2, images=["new"])
    _, answer = ask(engine, wire.PREFILL_PREFIX + "/v1/completions")
    # Of each of them the decoder finds something else.
    assert read(answer) == TurnStats(
        prefilled_tokens=6,
        prefiller_lmcache_tokens=2,
        encoded_images=2,
        encoded_tokens=32,
        node_images=4,
    )


def test_an_engine_that_fails_a_prefill_says_so_though_a_stream_has_begun() -> None:
    class Streaming(Engine):
        async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await super().app(scope, receive, send)
            except ValueError:
                await JSONResponse({"error": "within the stream"})(scope, receive, send)

    engine = Streaming(fails=ValueError("too large an image"))
    status, answer = ask(engine, wire.PREFILL_PREFIX + "/v1/chat/completions")
    assert status == 400
    assert "too large an image" in answer["error"]["message"]


async def test_a_prefill_that_nobody_waits_for_is_given_up() -> None:
    engine = Engine(hangs=True)
    serving = asyncio.ensure_future(
        engine.turns(
            scope_of(path=wire.PREFILL_PREFIX + "/v1/completions"),
            receiver(),
            None,  # type: ignore[arg-type]
        )
    )
    await asyncio.sleep(0.01)
    assert engine.ran
    serving.cancel()
    await asyncio.wait([serving])
    assert engine.closed == 1


def test_what_only_counts_tokens_leaves_the_cache_of_media_alone() -> None:
    """It has a half in the engine's core, to which none of that comes."""
    engine = Engine()
    for path in (COUNT_TOKENS, MESSAGES):
        assert ask(engine, path)[0] == 200
    assert engine.skipped == [True, False]


def test_any_other_request_is_served() -> None:
    engine = Engine()
    assert ask(engine, MESSAGES) == (200, {"served": MESSAGES})
    ((params, _),) = engine.ran
    assert params is WANTED
    assert engine.skipped == [False]
