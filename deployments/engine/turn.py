"""One turn inside its engine's server: what the engine is told of it, and what it tells.

A stream that another engine began, and lost, goes on here. The engine gets the prompt and the
tokens so far as one prompt. The outputs that the client has are put out once more, so that vLLM's
parsers, usage and recognition see one whole stream; the router leaves out the events that the
client has. Text comes from vLLM's own detokenizer over all tokens, since characters and stop
strings may lie across the break.

Internals of vLLM 0.29 that are used: ``IncrementalDetokenizer``, ``EngineCoreRequest``.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Message, Send
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError

from conserve import wire
from conserve.apis import form_of
from conserve.pausing import tool_called
from conserve.recognition import Digest
from conserve.recognition.apis import answers_of
from conserve.turn import TurnKey, TurnStats
from conserve.wire import Emitted
from deployments.engine.answers import Answer
from deployments.engine.response_events import is_stream


@dataclass(slots=True)
class EngineTurn:
    """One turn of a router; it is over when it is reported.

    Attributes:
        last: the message that the answer continues, if it does.
        stored_tokens, kept_tokens, parks: of its prompt, for the engine's connector.
        expected_tokens: of its prompt, how many caches should have.
        sent: outputs of an engine before this one, where the stream is continued.
        answer: what its router gets.
        engine_ends: called when the engine aborts its requests because it is told to end.
        reports: called once with the turn, its answers' tails, and whether it is complete.
        before, stats: its record as it came, and as it is now.
    """

    asked: wire.DecoderTurn
    key: TurnKey
    path: str
    last: Any
    sent: list[Emitted]
    before: TurnStats
    stored_tokens: int | None
    kept_tokens: int | None
    parks: bool
    expected_tokens: int
    answer: Answer
    engine_ends: Callable[[], None]
    reports: "Callable[[EngineTurn, tuple[Digest, ...], bool], None]"
    stats: TurnStats = field(init=False)
    # Whether outputs are noted, for another engine to continue, and those that are in no event yet.
    notes: bool = field(init=False)
    unnoted: list[Emitted] = field(default_factory=list)
    # --- What the engine has done ---
    started: int = 0
    finished: int = 0
    output_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    encoded: wire.Encoded = wire.NOTHING_ENCODED
    stages: wire.StageTimes = wire.NO_STAGES
    # --- What the client is told ---
    status: int = 0
    streamed: bool = False
    reported: bool = False

    def __post_init__(self) -> None:
        self.stats = msgspec.structs.replace(self.before, encoded_tokens=0)
        self.notes = self.asked.notes

    @property
    def has_begun(self) -> bool:
        """Whether the engine has done anything for the turn."""
        return self.stats.prompt_tokens > 0

    def tell_engine(self, prompt: Any, sampling_params: Any, schedules: bool) -> None:
        """Tell a request's connector and scheduler of the turn, before the engine gets it."""
        # These also ask LMCacheMPConnector for its statistics.
        extra = dict(sampling_params.extra_args or {})
        prefilled = self.before.prefiller_cached_tokens is not None
        params = wire.transfer_params(
            self.stored_tokens, self.parks, prefilled=prefilled, kept_tokens=self.kept_tokens
        )
        extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **params}
        if schedules:
            history_key = wire.history_key(self.key.history_id, self.key.incarnation)
            extra["kv_transfer_params"] |= wire.scheduled_turn(
                history_key, self.asked.resume_s, self.asked.last, self.asked.background
            )
        sampling_params.extra_args = extra
        self.started += 1
        # An answer in one piece tells nothing before its end, which it may not reach.
        given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        self._has_prompt(given)
        self.notes &= self.started == 1 and can_be_continued(prompt, sampling_params)

    def _has_prompt(self, ids: Any) -> None:
        self.stats.prompt_tokens = max(self.stats.prompt_tokens, len(ids or ()))

    def see(self, output: Any, delta: bool) -> None:
        stats = self.stats
        self._has_prompt(output.prompt_token_ids)
        for choice in output.outputs:
            key = (output.request_id, choice.index)
            new = len(choice.token_ids)
            self.output_tokens[key] = self.output_tokens.get(key, 0) + new if delta else new
            stats.output_tokens = max(stats.output_tokens, self.output_tokens[key])
        found = wire.cached_tokens(output.kv_transfer_params)
        if found.own_tokens is not None and found.lmcache_tokens is not None:
            if found.lmcache_tokens >= stats.lmcache_tokens:
                stats.decoder_cached_tokens = found.own_tokens
                stats.lmcache_tokens = found.lmcache_tokens
        elif output.num_cached_tokens is not None and not stats.lmcache_tokens:
            cached_tokens = max(stats.decoder_cached_tokens, output.num_cached_tokens)
            stats.decoder_cached_tokens = cached_tokens
        stats.missed_tokens = max(stats.missed_tokens, found.missed_tokens)
        stats.late |= found.late
        told = wire.engine_told(output.kv_transfer_params)
        if told.waited_s is not None and told.waited_s >= (stats.engine_wait_s or 0.0):
            stats.engine_wait_s, stats.engine_wait_for = told.waited_s, told.waited_for
        if told.kept_tokens is not None:
            stats.kept_tokens, stats.kept_s = told.kept_tokens, told.kept_s
        # Of several choices, the one that encoded.
        self.encoded = own = max(self.encoded, wire.encoded(output.ec_transfer_params))
        stats.encoded_tokens = own.tokens
        stats.encoded_images = self.before.encoded_images + own.images
        stats.node_images = self.before.node_images + own.node_images
        # Of several choices, the one that took longest.
        self.stages = max(self.stages, told.stages, key=sum)
        stats.encode_wait_s, stats.encode_s, stats.prefill_s = self.stages
        self._see_times(output.metrics)
        if output.finished:
            self.finished += 1

    def _see_times(self, times: Any) -> None:
        """Take over vLLM's times of the request, or of the last of several."""
        stats = self.stats
        stats.engine_queued_s = stats.engine_prefill_s = None
        if times is None:
            return
        if 0 < times.first_token_ts <= times.last_token_ts:
            decode_s = times.last_token_ts - times.first_token_ts
            stats.decode_s = max(stats.decode_s or 0.0, decode_s)
        if 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts:
            stats.engine_queued_s = times.scheduled_ts - times.queued_ts
            stats.engine_prefill_s = times.first_token_ts - times.scheduled_ts

    def put_out(self, output: Any) -> None:
        # Only the table is told; vLLM would pass it on to the client.
        output.kv_transfer_params = output.ec_transfer_params = None
        # Clients are told what no engine computed for this turn.
        most = self.before.prefiller_cached_tokens
        if most is not None and output.num_cached_tokens is not None:
            computed = max(0, output.num_cached_tokens - most)
            output.num_cached_tokens -= computed
            # The Messages API also tells what was computed and is in a cache now.
            if output.num_cache_creation_tokens is not None:
                output.num_cache_creation_tokens += computed
        if self.stats.reused_tokens is None:
            self.stats.reused_tokens = output.num_cached_tokens
        if self.notes:
            self.unnoted += (
                Emitted(choice.token_ids, choice.finish_reason, choice.stop_reason)
                for choice in output.outputs
            )

    def require_an_answer(self, output: Any, params: Any) -> None:
        """Raise where vLLM passes on an output that is no answer.

        Raises:
            EngineDeadError: the engine is told to end and aborts its requests, which would look
                like the answer's own end.
            VLLMValidationError: no grammar can be made of what was asked for, which vLLM finds out
                after it has taken the request.
        """
        reasons = {choice.finish_reason for choice in output.outputs}
        if "abort" in reasons:
            # This turn's client has not left, or nothing would read this.
            self.engine_ends()
            raise EngineDeadError
        unfit = "error" in reasons and params.structured_outputs is not None
        if unfit and not any(self.output_tokens.values()):
            raise VLLMValidationError(
                "the engine can make no grammar of the output that is asked for; correct or "
                "simplify it",
                parameter="structured_outputs",
            )

    def relay(self, send: Send) -> Send:
        """Return a ``send`` that reports the turn before it tells the client of the end."""
        ends = form_of(self.path).ends

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.streamed = is_stream(message)
                message["headers"] = [*message["headers"], *self._own_headers()]
            elif message["type"] == "http.response.body" and not self.reported:
                part = message.get("body", b"")
                # vLLM sends every event as a part of its own.
                if part.startswith(ends) if self.streamed else not message.get("more_body"):
                    whole = self.status == 200 and 0 < self.started == self.finished
                    # The next turn follows only an answer that its client has.
                    self.report(await self.answer.is_read() and whole, part)
                    if self.streamed and self.has_begun:
                        message["body"] = wire.note(self.stats) + part
                    # The report is sent before the answer's end.
                    await asyncio.sleep(0)
                elif self.streamed and (unnoted := self.unnoted):
                    message["body"] = wire.note(unnoted) + part
                    self.unnoted = []
            await send(message)

        return observed_send

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """Return what its router is told beside the answer; one in one piece is complete by now."""
        # One that rejoins it may have come without a key.
        own = [(wire.TURN_HEADER.encode(), wire.header_value(self.key).encode())]
        if not self.streamed and self.has_begun:
            own.append((wire.SUMMARY_HEADER.encode(), msgspec.json.encode(self.stats)))
        return own

    def report(self, completed: bool, last_part: bytes = b"") -> None:
        self.reported = True
        answers: list[dict[str, Any]] = []
        tails: tuple[Digest, ...] = ()
        if completed and (beginning := self.asked.beginning) is not None:
            parts = [*(one.get("body", b"") for one in self.answer.messages), last_part]
            answers = answers_of(self.path, parts, self.streamed)
            tails = tuple(tail for one in answers for tail in beginning.tails(one, self.last))
        if self.has_begun and answers:
            # The client goes on with one of several choices; the first is as likely as any.
            self.stats.tool = tool_called(answers[0])
        self.reports(self, tails, completed)


def can_be_continued(prompt: Any, params: Any) -> bool:
    """Return whether another engine would continue a request's output as this one would.

    It would not where output depends on more than the tokens before it: several choices,
    log-probabilities (those of sent tokens are lost), a grammar, penalties and bans that tell
    output from prompt, or a seed, whose random numbers would begin anew.
    """
    return (
        isinstance(prompt, dict)
        and isinstance(prompt.get("prompt_token_ids"), list)
        and prompt.get("prompt_embeds") is None
        and params.output_kind.name == "DELTA"
        and params.n == 1
        and params.detokenize
        and params.logprobs is None
        and params.prompt_logprobs is None
        and not params.logprob_token_ids
        and params.structured_outputs is None
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.bad_words
        and params.thinking_token_budget is None
        and params.repetition_detection is None
        and (params.seed is None or params.temperature == 0)
        and not set(params.extra_args or ()) - {"kv_transfer_params"}
    )


async def continued(
    sent: Sequence[Emitted],
    prompt: dict[str, Any],
    params: Any,
    request_id: str,
    tokenizer: Any,
    *,
    generate: Callable[[dict[str, Any], Any], Any],
    see: Callable[[Any], None],
) -> AsyncIterator[Any]:
    """Yield what ``AsyncLLM.generate`` would if this engine had generated all of it.

    Args:
        sent: the outputs so far.
        params: ``SamplingParams`` for which `can_be_continued` holds.
        generate: runs a prompt with other parameters, and yields ``RequestOutput``.
        see: is given each output as the engine made it.
    """
    prompt_ids: list[int] = prompt["prompt_token_ids"]
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer,
        EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        ),
    )

    def shown(emitted: Emitted, raw: Any = None) -> Any:
        stopped = emitted.finish_reason == "stop" and not isinstance(emitted.stop_reason, str)
        reason, why = emitted.finish_reason, emitted.stop_reason
        if (found := detokenizer.update(list(emitted.token_ids), stopped)) is not None:
            reason, why = "stop", found
        choice = CompletionOutput(
            index=0,
            text=detokenizer.get_next_output_text(reason is not None, delta=True),
            token_ids=emitted.token_ids,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=reason,
            stop_reason=why,
        )
        return RequestOutput(
            request_id,
            prompt.get("prompt"),
            prompt_ids,
            None,
            [choice],
            reason is not None,
            metrics=getattr(raw, "metrics", None),
            num_cached_tokens=getattr(raw, "num_cached_tokens", None),
            kv_transfer_params=getattr(raw, "kv_transfer_params", None),
        )

    over = sent[-1] if sent and sent[-1].finish_reason is not None else None
    for emitted in sent[:-1] if over else sent:
        yield shown(emitted)
    token_ids = [token_id for emitted in sent for token_id in emitted.token_ids]
    rest = params.clone()
    # The engine would look for stop strings only in the text of its own tokens.
    rest.stop, rest.detokenize = [], False
    rest.min_tokens = max(params.min_tokens - len(token_ids), 0)
    if params.max_tokens is not None:
        rest.max_tokens = params.max_tokens - len(token_ids)
    if over:
        # The last token is generated once more, and dropped, so that this engine holds the KV of
        # those before it.
        rest.max_tokens, rest.min_tokens = 1, 0
        token_ids.pop()
    whole = {**prompt, "prompt_token_ids": [*prompt_ids, *token_ids]}
    async with aclosing(generate(whole, rest)) as stream:
        async for raw in stream:
            if over:
                see(raw)
                continue
            (choice,) = raw.outputs
            output = shown(Emitted(choice.token_ids, choice.finish_reason, choice.stop_reason), raw)
            # A stop string ends it, which the engine does not know.
            raw.finished = output.finished
            see(raw)
            yield output
            if output.finished:
                return
    if over:
        yield shown(over)
