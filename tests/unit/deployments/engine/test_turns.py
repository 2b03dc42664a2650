"""What a decoder makes of outputs that are none, however its stream began."""

import asyncio
import copy
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.exceptions import EngineDeadError

import deployments.engine.copies
from conserve import wire
from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TURN_PATHS, form_of
from conserve.clock import unix_s
from conserve.direct import Desk, Digested, Ended, Notice
from conserve.embedded import model_path
from conserve.holdings import Holdings
from conserve.recognition import chain_of
from conserve.recording import block_digests
from conserve.turn import TurnKey, TurnStats
from conserve.wire import Emitted
from deployments.engine.copies import Copies
from deployments.engine.reporter import ALL_TOKENS, LoadMeter
from deployments.engine.vision.images import FailedImages, ImageNotEncoded
from deployments.node.kv_files import FOLDER, OwnFiles
from tests.unit.deployments import asgi
from tests.unit.deployments.asgi import exchange, receiver, respond, scope_of
from tests.unit.deployments.engine.following import engine_turns

PROMPT = [5, 6, 7]


def a_desk() -> Desk:
    """Of a decoder that the table knows."""
    desk = Desk(Holdings(), 60)
    desk.outbox.register()
    return desk


def told(desk: Desk) -> list[Ended]:
    """What the table is to be told of turns' ends."""
    report = desk.outbox.next()
    return [] if report is None else [one for one in report.events if isinstance(one, Ended)]


def stats_of(desk: Desk) -> list[TurnStats]:
    stats = [one.stats for one in told(desk)]
    assert None not in stats
    return stats  # type: ignore[return-value]


class Decoder:
    """An engine that puts out a few tokens and then ends for a reason, behind its HTTP app."""

    def __init__(
        self,
        reason: str,
        tokens: int = 2,
        cached: int | None = None,
        schedules: bool = False,
        **params: Any,
    ) -> None:
        self.desk = a_desk()
        self.told_cached: list[int | None] = []
        self.told_created: list[int | None] = []
        # What the engine says of its prompt's KV.
        self.found: dict[str, Any] = {}
        # What its scheduler says of the turn.
        self.said: dict[str, Any] = {}
        self.transfer_params: list[dict[str, Any]] = []
        # What vLLM has made of the prompt's images.
        self.images: dict[str, Any] = {}
        self.fails: str | None = None
        # vLLM's times of the request.
        self.times: Any = None
        self.aborted: list[str] = []
        # Of each output instead of `found`.
        self.founds: list[dict[str, int]] = []
        self._cached = cached
        self._reason = reason
        self._tokens = tokens
        self._params = SamplingParams(output_kind=RequestOutputKind.DELTA, **params)
        self.client = SimpleNamespace(
            generate=self._generate, tokenizer=get_tokenizer(str(model_path()))
        )
        # What is expected of the prompt at each output, by the engine's meter of its load.
        self.expected: list[dict[str, tuple[int, int]]] = []
        self.meter = LoadMeter({})
        self.failed = FailedImages(self.aborted.extend)
        engine = SimpleNamespace(model="m", use_mla=False, world_size=1)
        config = SimpleNamespace(model_config=engine, parallel_config=engine)
        self.copies = Copies("http://127.0.0.1:1", config, most_tokens=5, chunk_tokens=2)
        self.failure: Exception | None = None
        self.turns = engine_turns(
            self._app, self.client, desk=self.desk, meter=self.meter, failed=self.failed,
            missing_tokens=self._missing, schedules=schedules, copies=self.copies,
        )  # fmt: skip

    @staticmethod
    def _missing(images: list[tuple[str, Any]]) -> int:
        return 16 * len(images)

    async def _generate(
        self, prompt: dict[str, Any], params: Any, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        self.transfer_params.append((params.extra_args or {}).get("kv_transfer_params", {}))
        for number in range(self._tokens + 1):
            reason = self._reason if number == self._tokens else None
            ids = [] if reason else [40 + number]
            found = self.founds[number] if self.founds else self.found
            if self.fails is not None:
                self.failed.have_failed([self.fails])
                self.fails = None
            self.expected.append(dict(self.meter._expected))
            choice = CompletionOutput(0, "x", ids, None, None, finish_reason=reason)
            given = prompt["prompt_token_ids"]
            yield RequestOutput(
                "r", None, given, None, [choice], reason is not None,
                num_cached_tokens=self._cached, num_cache_creation_tokens=5,
                kv_transfer_params={"cached_token_stats": found, **self.said},
                ec_transfer_params={wire.ENCODED: [1, 16, 0]} if reason and self.images else None,
                metrics=self.times,
            )  # fmt: skip

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """As vLLM has it: an error in a stream is an event, and [DONE] comes after it."""
        if scope["path"] == "/health":
            await respond(send, b"")
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        prompt = {"type": "token", "prompt_token_ids": PROMPT, **self.images}
        events = []
        try:
            async for output in self.client.generate(prompt, copy.copy(self._params), "r"):
                # What routers and connectors tell each other is not for clients.
                assert output.kv_transfer_params is output.ec_transfer_params is None
                self.told_cached.append(output.num_cached_tokens)
                self.told_created.append(output.num_cache_creation_tokens)
                events.append(b"data: " + output.outputs[0].text.encode() + b"\n\n")
                await send({"type": "http.response.body", "body": events[-1], "more_body": True})
        except Exception as error:
            self.failure = error
            body = b'data: {"error": {}}\n\n'
            await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, path: str, sent: bytes = b"", **headers: str) -> tuple[int, bytes]:
        given = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ]
        messages = exchange(self.turns, sent + b"{}", path=path, headers=given)
        return messages[0]["status"], b"".join(one["body"] for one in messages[1:])

    def turn(self, sent: bytes = b"", prefill_cached: int | None = None, **more: Any) -> bytes:
        stats = more.pop("stats", TurnStats(prefiller_cached_tokens=prefill_cached))
        told = wire.DecoderTurn(FIRST, sent_bytes=len(sent), stats=stats, notes=True, **more)
        return self.ask("/v1/completions", sent, **{wire.TURN_HEADER: told.header()})[1]


FIRST = TurnKey("c", 1, 1)
SENT = wire.note([Emitted([41])])


@pytest.mark.parametrize("sent", [b"", SENT])
def test_an_answer_that_the_engine_aborts_is_none(sent: bytes) -> None:
    decoder = Decoder("abort")
    assert decoder.ask("/health")[0] == 200
    assert b'"error"' in decoder.turn(sent)
    assert isinstance(decoder.failure, EngineDeadError)
    # Nothing of it is completed, and nobody takes the engine for one that lives on.
    assert [one.completed for one in told(decoder.desk)] == [False]
    assert decoder.ask("/health")[0] == 503
    assert decoder.turns.ending


@pytest.mark.parametrize("sent", [b"", SENT])
def test_one_that_comes_to_its_end_is_complete(sent: bytes) -> None:
    decoder = Decoder("length")
    answer = decoder.turn(sent)
    assert decoder.failure is None
    assert [one.completed for one in told(decoder.desk)] == [True]
    assert decoder.ask("/health")[0] == 200
    lines = [line + b"\n" for line in answer.split(b"\n") if line.startswith(wire.NOTE_MARK)]
    *notes, summary = lines
    assert summary.startswith(wire.SUMMARY_MARK)
    emitted = wire.read_notes(b"".join(notes))
    assert [one.finish_reason for one in emitted][-1] == "length"
    assert [id_ for one in emitted for id_ in one.token_ids] == [*([41] if sent else []), 40, 41]


def test_a_router_is_told_what_the_turn_took() -> None:
    decoder = Decoder("length", cached=2)
    decoder.found = {"num_vllm_cached_tokens": 1, "num_lmcache_extra_cached_tokens": 1}
    decoder.times = SimpleNamespace(
        queued_ts=10.0, scheduled_ts=10.5, first_token_ts=11.5, last_token_ts=14.0
    )
    answer = decoder.turn()
    before, ends, _ = answer.partition(b"data: [DONE]")
    assert ends
    line = before.rpartition(b"\n\n")[2]
    assert line.startswith(wire.SUMMARY_MARK)
    told = wire.read_summary(line.removeprefix(wire.NOTE_MARK))
    assert told == TurnStats(
        len(PROMPT), 2, 1, 1, reused_tokens=2, engine_queued_s=0.5, engine_prefill_s=1.0,
        decode_s=2.5,
    )  # fmt: skip
    # An engine that keeps no times (`disable_log_stats`) tells the rest.
    decoder.times = None
    assert b'queued_s"' not in decoder.turn()


def test_an_engine_is_told_what_lmcache_may_have_and_is_to_have() -> None:
    decoder = Decoder("length")
    for looks_up, stored, parks in [
        (True, None, False),
        (False, len(PROMPT), False),
        (False, len(PROMPT), True),
        (False, len(PROMPT), False),
        (True, None, True),
    ]:
        decoder.turn(looks_up=looks_up, parks=parks)
        params = decoder.transfer_params[-1]
        assert params.get(wire.STORED_TOKENS) == stored
        assert params.get(wire.PARK, False) == parks


def test_prompts_are_remembered_that_are_in_host_memory_and_have_no_images() -> None:
    decoder = Decoder("length")
    decoder.turn()
    decoder.images = IMAGES
    decoder.turn(parks=True)
    assert not decoder.copies._prompts
    decoder.images = {}
    decoder.turn(parks=True)
    kept = {"c": (array("I", PROMPT), "", True, "")}
    assert decoder.copies._prompts == kept
    decoder.turn()
    assert decoder.copies._prompts == kept
    # Of more than host memory holds, the oldest are forgotten.
    decoder.copies.keep("other", PROMPT, "salt")
    assert [*decoder.copies._prompts] == ["other"]


async def test_files_of_conversations_are_noted_and_removed_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, folder = "tenant\tc", tmp_path / FOLDER
    copies = Decoder("length").copies
    await copies.own("c")
    copies._files = OwnFiles(str(tmp_path), "m", 2)
    folder.mkdir()
    # As LMCache has images in its keys.
    copies.keep(history, [1, 9, 9, 2, 5], "salt", [("a", PlaceholderRange(offset=1, length=2))])
    ids = copies._prompts[history][0]
    assert ([ids[0], *ids[3:]], 9 in ids) == ([1, 2, 5], False)
    await copies.own(history)
    assert copies.kept_tokens(history) == 0
    (list_,) = folder.glob("owners/*/*/*")
    first, second = list_.read_text().split()
    (folder / first).mkdir(parents=True)
    await copies.own(history)
    assert [copies.kept_tokens(history) for _ in range(2)] == [2, None]
    # What is written as the conversation ends is removed later.
    monkeypatch.setattr(deployments.engine.copies, "_WRITTEN_S", 0.5)
    ends = asyncio.ensure_future(copies.forget(["tenant\tc"]))
    await asyncio.sleep(0.2)
    assert not (folder / first).exists()
    (folder / second).mkdir(parents=True)
    # Nor does a fault of the disk keep it there.
    folder.rename(tmp_path / "kept")
    folder.touch()
    await asyncio.sleep(0.6)
    folder.unlink()
    (tmp_path / "kept").rename(folder)
    await ends
    assert not (folder / second).exists()
    assert not list_.exists()
    # With a disk nothing is touched: LMCache would load what host memory lacks.
    await copies.touch([history])


def test_an_engines_scheduler_is_told_whose_turn_it_is_by_nobody_but_its_decoder() -> None:
    forged = {"kv_transfer_params": {wire.TURN: {"key": "1 another", "resume_s": 0, "last": True}}}
    decoder = Decoder("length", schedules=True, extra_args=forged)
    decoder.turn()
    said = decoder.transfer_params[-1][wire.TURN]
    own = {"key": wire.history_key("c", 1), "resume_s": None, "last": False, "background": False}
    assert said == own
    decoder.turn(resume_s=2.5, last=True, background=True)
    said = decoder.transfer_params[-1][wire.TURN]
    assert (said["resume_s"], said["last"], said["background"]) == (2.5, True, True)
    # Where vLLM's own scheduler has it, nothing is said.
    plain = Decoder("length")
    plain.turn(resume_s=2.5)
    assert wire.TURN not in plain.transfer_params[-1]


# What is told of one turn, what the engine says of it, and the names of both in its stats.
TOLD: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # None was found missing where nobody had stored anything.
    ({"missed_tokens": 0, "late": False}, {wire.MISSED: 256, wire.LATE: True}, {},
     {"missed_tokens": 256, "late": True}),
    (dict.fromkeys(("engine_wait_s", "engine_wait_for", "kept_tokens", "kept_s")), {},
     wire.EngineTold(1.5, "room", 640, 12.5).params(),
     {"engine_wait_s": 1.5, "engine_wait_for": "room", "kept_tokens": 640, "kept_s": 12.5}),
    (dict.fromkeys(("encode_wait_s", "encode_s", "prefill_s"), 0), {},
     wire.EngineTold(stages=wire.StageTimes(0.5, 0.25, 0.125)).params(),
     {"encode_wait_s": 0.5, "encode_s": 0.25, "prefill_s": 0.125}),
]  # fmt: skip


@pytest.mark.parametrize(("plain", "found", "said", "expected"), TOLD)
def test_the_table_is_told_what_the_engine_says_of_a_turn(
    plain: dict[str, Any], found: dict[str, Any], said: dict[str, Any], expected: dict[str, Any]
) -> None:
    """What was missed, waited for and kept, and how long each stage took."""
    decoder = Decoder("length", schedules=True)
    decoder.turn()
    decoder.found, decoder.said = found, said
    decoder.turn(prefill_cached=0)
    assert [wire.PREFILLED in params for params in decoder.transfer_params] == [False, True]
    for stats, wanted in zip(stats_of(decoder.desk), (plain, expected), strict=True):
        assert {name: getattr(stats, name) for name in wanted} == wanted


def test_of_a_turns_prompt_caches_should_have_what_is_held_here_or_was_prefilled() -> None:
    decoder = Decoder("length", tokens=2)
    for prefill_cached, expected in [(None, 0), (None, len(PROMPT) + 2), (0, ALL_TOKENS)]:
        decoder.turn(prefill_cached=prefill_cached)
        assert decoder.expected[-3:] == [{"r": (expected, 0)}] * 3
        assert decoder.meter._expected == {}


def test_of_several_choices_the_one_that_loaded_the_prompt_counts() -> None:
    """The others find it in the engine's own cache, whichever is answered first."""
    loaded = {"num_vllm_cached_tokens": 1, "num_lmcache_extra_cached_tokens": 2}
    found = {"num_vllm_cached_tokens": 3, "num_lmcache_extra_cached_tokens": 0}
    for founds in ([loaded, found], [found, loaded]):
        decoder = Decoder("length", tokens=1)
        decoder.founds = founds
        decoder.turn()
        (stats,) = stats_of(decoder.desk)
        assert (stats.decoder_cached_tokens, stats.lmcache_tokens) == (1, 2)


IMAGES = {"mm_hashes": {"image": ["seen", "new"]}, "mm_placeholders": {"image": [None, None]}}


def test_what_images_took_here_and_on_the_prefiller_is_told() -> None:
    decoder = Decoder("length")
    decoder.images = IMAGES
    decoder.turn(stats=TurnStats(encoded_images=2, encoded_tokens=40, node_images=1))
    (stats,) = stats_of(decoder.desk)
    assert (stats.encoded_images, stats.encoded_tokens, stats.node_images) == (3, 16, 1)
    assert decoder.expected[-1] == {"r": (0, 32)}


@pytest.mark.parametrize("sent", [b"", SENT])
def test_a_turn_whose_image_cannot_be_encoded_ends_and_its_engine_does_not(sent: bytes) -> None:
    decoder = Decoder("abort")
    decoder.images, decoder.fails = IMAGES, "new"
    assert b'"error"' in decoder.turn(sent)
    assert isinstance(decoder.failure, ImageNotEncoded)
    assert decoder.aborted == ["r"]
    assert [one.completed for one in told(decoder.desk)] == [False]
    assert decoder.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("found", "by_prefiller", "told"),
    [(2, None, 2), (2, 0, 0), (3, 1, 1), (1, 3, 1), (None, 0, None)],
)
def test_clients_are_told_what_no_engine_computed(
    found: int | None, by_prefiller: int | None, told: int | None
) -> None:
    """What a prefiller has computed a moment ago is found in LMCache, and is not found."""
    decoder = Decoder("length", cached=found)
    decoder.turn(prefill_cached=by_prefiller)
    assert decoder.failure is None
    assert set(decoder.told_cached) == {told}
    # In a cache it is now, with what the decoder has put there.
    assert set(decoder.told_created) == {5 + (found or 0) - (told or 0)}


GRAMMAR = StructuredOutputsParams(grammar="root ::= root")


@pytest.mark.parametrize(
    ("tokens", "asked", "failure"),
    [
        # No grammar can be made of what the client has sent.
        (0, {"structured_outputs": GRAMMAR}, VLLMValidationError),
        # vLLM tells the client itself.
        (0, {}, type(None)),
        (2, {}, type(None)),
    ],
)
def test_an_error_without_output_is_the_grammars_where_there_is_one(
    tokens: int, asked: dict[str, Any], failure: type
) -> None:
    decoder = Decoder("error", tokens=tokens, **asked)
    decoder.turn()
    assert isinstance(decoder.failure, failure)
    assert not decoder.turns.ending


@pytest.mark.parametrize("path", TURN_PATHS)
async def test_a_turn_is_reported_before_its_client_learns_of_the_end(path: str) -> None:
    """By each API's last event; and by none before it."""
    last = form_of(path).ends[0] + b"data: {}\n\n" * (path not in (CHAT, COMPLETIONS))
    parts = [b"event: a\ndata: {}\n\n", b'data: {"b": 1}\n\n', last, b""]
    desk = a_desk()
    reported: list[int] = []

    async def generate(*_: Any) -> AsyncIterator[RequestOutput]:
        yield RequestOutput("r", None, PROMPT, None, [], finished=True)

    client = SimpleNamespace(generate=generate)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        async for _ in client.generate({"prompt_token_ids": PROMPT}, params, "r"):
            pass
        await respond(send, *parts, headers={"content-type": "text/event-stream"})

    async def send(message: Any) -> None:
        reported.append(len(more))

    headers = {wire.TURN_HEADER: wire.DecoderTurn(FIRST).header()}
    more: list[None] = []
    turns = engine_turns(app, client, desk=desk, has_more=lambda: more.append(None))
    await turns(scope_of(headers, path=path, method="POST"), receiver(b"{}"), send)
    assert [one.completed for one in told(desk)] == [True]
    # The start, two events, the last of them, and the end of the body.
    assert reported == [0, 0, 0, 1, 1]


CALLED: dict[str, bytes] = {
    CHAT: b'{"choices": [{"message": {"content": null, "tool_calls": [{"id": "1", "type": '
    b'"function", "function": {"name": "bash", "arguments": "{}"}}]}}]}',
    MESSAGES: b'{"type": "message", "content": [{"type": "tool_use", "id": "1", "name": "bash", '
    b'"input": {}}]}',
    RESPONSES: b'{"object": "response", "status": "completed", "output": [{"type": '
    b'"function_call", "call_id": "1", "name": "bash", "arguments": "{}"}]}',
}
STREAMED: dict[str, list[bytes]] = {
    CHAT: [
        b'data: {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "1", '
        b'"function": {"name": "bash"}}]}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}\n\n',
        b"data: [DONE]\n\n",
    ],
    MESSAGES: [
        b'event: content_block_start\ndata: {"type": "content_block_start", "index": 0, '
        b'"content_block": {"type": "tool_use", "id": "1", "name": "bash"}}\n\n',
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    ],
    RESPONSES: [
        b'event: response.completed\ndata: {"type": "response.completed", "response": %b}\n\n'
        % CALLED[RESPONSES]
    ],
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_the_table_and_the_holdings_are_told_what_an_answer_calls(
    path: str, streamed: bool, reason: str
) -> None:
    """By each API; and nothing of an answer that was cut."""
    parts = STREAMED[path] if streamed else [CALLED[path]]

    async def generate(*_: Any) -> AsyncIterator[RequestOutput]:
        times = SimpleNamespace(
            queued_ts=11.0, scheduled_ts=11.0, first_token_ts=12.0, last_token_ts=14.5
        )
        finished = reason == "stop"
        yield RequestOutput("r", None, PROMPT, None, [], finished=finished, metrics=times)  # type: ignore[arg-type]

    client = SimpleNamespace(generate=generate)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async for _ in client.generate({"prompt_token_ids": PROMPT}, SamplingParams(), "r"):
            pass
        kind = "text/event-stream" if streamed else "application/json"
        await respond(send, *parts, headers={"content-type": kind})

    asked = wire.DecoderTurn(FIRST, beginning=chain_of([]).beginning)
    headers = {wire.TURN_HEADER: asked.header()}
    holdings, desk = Holdings(), a_desk()
    turns = engine_turns(app, client, holdings=holdings, desk=desk)
    body = {"messages": [], "input": []}
    sent = exchange(turns, body, method="POST", path=path, headers=headers)
    called = "bash" if reason == "stop" else None
    (stats,) = stats_of(desk)
    assert stats.tool == called
    # And for how long it was put out, streamed or not.
    assert stats.decode_s == 2.5
    assert [one.tool for one in holdings.all()] == [called]
    # Its router is told in the answer: of one in one piece in a header, and else in its last event.
    beginning = dict(sent[0]["headers"])
    if streamed:
        last = next(one["body"] for one in reversed(sent) if one.get("body"))
        told_router = last.partition(b"\n")[0].removeprefix(wire.NOTE_MARK)
        assert wire.SUMMARY_HEADER.encode() not in beginning
    else:
        told_router = beginning[wire.SUMMARY_HEADER.encode()]
    assert wire.read_summary(told_router).engine_prefill_s == 1.0


def test_a_turn_that_came_straight_names_its_conversation_to_whoever_keeps_its_response() -> None:
    holdings = Holdings()
    first = TurnKey("c", 1, 256)
    holdings.begin(first, root=b"root")
    holdings.finish(first, TurnStats(9, 1, 0, 0), (b"answered",), completed=True)
    desk = Desk(holdings, idle_timeout_s=60)
    desk.outbox.register()
    desk.hear(Notice(1), asked_s=unix_s())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b'{"status": "completed", "output": []}')

    straight = wire.Straight(b"answered", "c")
    asked = wire.DecoderTurn(straight=straight, root=b"root")
    headers = {wire.TURN_HEADER: asked.header()}
    turns, body = engine_turns(app, holdings=holdings, desk=desk), {"request_id": "resp_1"}
    sent = exchange(turns, body, method="POST", path=RESPONSES, headers=headers)
    found = wire.read_key(asgi.told(sent)[1][wire.TURN_HEADER])
    assert (found.history_id, found.turn_id) == ("c", 257)
    kept = exchange(turns, method="GET", path=wire.STORED_PREFIX + "resp_1")
    assert json.loads(asgi.told(kept)[2])["history_id"] == "c"


def test_a_recorder_gets_digests_of_the_prompt_after_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conserve.recording.BLOCK_TOKENS", 2)
    begun: list[Any] = []
    monkeypatch.setattr("deployments.engine.turns.in_background", begun.append)
    decoder = Decoder("length")
    decoder.turns.copies = None
    decoder.turn()
    assert not begun
    decoder.desk.hear(Notice(0, salt=b"s"), unix_s())
    decoder.turn()
    for one in begun[:1]:
        asyncio.run(one)
    report = decoder.desk.outbox.next()
    assert report is not None
    assert report.events[-1] == Digested(FIRST, block_digests(b"s", PROMPT, ()))
    assert len(report.events[-1].blocks) == 8
    decoder.desk.hear(Notice(1), unix_s())
    decoder.turn()
    assert len(begun) == 1
