"""Has vLLM judge a turn's request, or compute its prompt's KV, without answering it.

``POST /conserve/check/v1/chat/completions`` (or another turn's path) runs vLLM's own code for that
path, up to the call that would schedule the request. So the turn's own rules judge its parameters
and render its prompt. ``POST /conserve/prefill/...`` has the engine compute the prompt, images
included, for one token, whatever answer the turn asks for. An engine that only encodes computes the
images alone, and no token.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.entrypoints.serve import create_error_response
from vllm.sampling_params import RequestOutputKind

from conserve import wire
from conserve.apis import MESSAGES, RESPONSES
from conserve.turn import TurnStats
from deployments.engine.vision.images import MissingTokens
from deployments.messages import Checked

# vLLM makes answers of these only from an output with a choice.
_WITH_A_CHOICE = (MESSAGES, RESPONSES)


@dataclass(slots=True)
class Check:
    """A request that is judged, or of which the prompt is prefilled, on a turn's own path.

    It is answered with `Checked` or `TurnStats` as JSON, and where the engine would refuse the
    request, as the engine does.
    """

    path: str
    prefills: bool
    found: Checked = field(default_factory=lambda: Checked([], False, 0))
    prefilled: list[TurnStats] = field(default_factory=list)
    refusal: Any = None

    def refuse(self, error: Exception) -> None:
        """Answer an error with its status."""
        # A stream would answer 200, and tell the error in its first event.
        self.refusal = create_error_response(error)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run vLLM's app on the turn, and answer with what was found."""
        status, parts = 0, []

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            path = self.path
            await app({**scope, "path": path, "raw_path": path.encode()}, receive, keep)
        except Exception:
            # A stream of responses raises what it meets.
            if self.refusal is None:
                raise
        if (refusal := self.refusal) is not None:
            answer: Response = JSONResponse(refusal.model_dump(), refusal.error.code)
        elif status == 200 and (found := self._answer()) is not None:
            answer = Response(msgspec.json.encode(found), media_type="application/json")
        else:
            answer = Response(b"".join(parts), status, media_type="application/json")
        await answer(scope, receive, send)

    def _answer(self) -> Checked | TurnStats | None:
        if self.prefills:
            return _all_of(self.prefilled) if self.prefilled else None
        return self.found if self.found.prompts else None

    def choices(self, sampling_params: Any) -> list[CompletionOutput]:
        """Return the choices that vLLM needs in the place of an answer's."""
        if not sampling_params.detokenize:
            # A beam search reads the first choice, and ends if that is empty.
            return [CompletionOutput(0, "", [], None, None)]
        if self.path in _WITH_A_CHOICE:
            return [CompletionOutput(0, "", [], None, None, finish_reason="stop")]
        return []

    def judged(
        self,
        asked: Any,
        missing_tokens: MissingTokens,
        request_id: str,
        choices: list[CompletionOutput],
    ) -> AsyncIterator[RequestOutput]:
        """Take in what vLLM's ``process_inputs`` has made of a request, and answer nothing."""
        ids = list(asked.prompt_token_ids or ())
        self.found.prompts.append(ids)
        images = [(one.identifier, one.mm_position) for one in asked.mm_features or ()]
        self.found.multimodal |= bool(images)
        self.found.encode_tokens += missing_tokens(images)
        return _nothing(request_id, ids, choices)

    async def prefill(
        self, stream: Any, choices: list[CompletionOutput]
    ) -> AsyncIterator[RequestOutput]:
        """Yield an empty answer once the prompt's KV is computed."""
        try:
            async with aclosing(stream):
                async for output in stream:
                    ids = list(output.prompt_token_ids or ())
                    found = wire.cached_tokens(output.kv_transfer_params)
                    encoded, times = wire.encoded(output.ec_transfer_params), output.metrics
                    self.prefilled.append(
                        TurnStats(
                            prefilled_tokens=len(ids),
                            prefiller_lmcache_tokens=found.lmcache_tokens or 0,
                            prefiller_cached_tokens=output.num_cached_tokens,
                            prefiller_s=times and times.first_token_ts - times.scheduled_ts,
                            encoded_images=encoded.images,
                            encoded_tokens=encoded.tokens,
                            node_images=encoded.node_images,
                        )
                    )
                    async for said in _nothing(output.request_id, ids, choices):
                        yield said
        except Exception as error:
            self.refuse(error)
            raise


async def _nothing(
    request_id: str, ids: list[int], choices: list[CompletionOutput]
) -> AsyncIterator[RequestOutput]:
    yield RequestOutput(request_id, None, ids, None, choices, finished=True)


def one_token(stores: bool) -> SamplingParams:
    """Return what a prefill asks for; ``stores``: its engine has a KV connector."""
    # A prefiller that hosts conversations stores only what it is told to, as a decoder does.
    told = {"kv_transfer_params": wire.transfer_params(park=True)} if stores else None
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=told,
    )


def _all_of(done: list[TurnStats]) -> TurnStats:
    whole = TurnStats(
        prefilled_tokens=sum(one.prefilled_tokens for one in done),
        prefiller_lmcache_tokens=sum(one.prefiller_lmcache_tokens for one in done),
        prefiller_cached_tokens=done[0].prefiller_cached_tokens if len(done) == 1 else None,
        prefiller_s=sum(one.prefiller_s or 0.0 for one in done) or None,
    )
    for one in done:
        whole.add_encoded(one)
    return whole
