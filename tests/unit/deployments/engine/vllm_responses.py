"""vLLM's own answers by the Responses API, of tokens that are given: no engine, else all of it."""

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from vllm import CompletionOutput, RequestOutput
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.logprobs import Logprob
from vllm.parser import ParserManager
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer

from conserve.embedded import model_path

RESPONSE_ID = "resp_0123456789abcdef0123456789abcdef"
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
# As a model may write it: with other spaces than Python's.
CALL = '<tool_call>\n{"name":"look_up","arguments":{"on":true,"at":[1,2]}}\n</tool_call>'

_PROMPT = [1, 2, 3]


class Answered:
    """An answer, as vLLM's server gives it.

    Args:
        text: what the model has said.
        finish_reason: why it said no more: ``stop``, or ``length``.
        logprobs: whether the request asks for them.
        request: what else it asks for.
    """

    def __init__(
        self, text: str, finish_reason: str = "stop", logprobs: bool = False, **request: Any
    ) -> None:
        self._tokenizer: Any = get_tokenizer(str(model_path()))
        self._ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        self._finish_reason = finish_reason
        self._logprobs = logprobs
        include = {"include": ["message.output_text.logprobs"]} if logprobs else {}
        asked = {"model": "m", "input": "x", "request_id": RESPONSE_ID, "tools": [TOOL], **include}
        # vLLM's own store is off.
        asked["store"] = False
        self._request = ResponsesRequest(**{**asked, **request})

    async def events(self) -> list[bytes]:
        """Its stream, an event each."""
        self._request.stream = True
        stream = self._server().responses_stream_generator(*self._arguments(self._outputs()))
        return [event.encode() async for event in _convert_stream_to_sse_events(stream)]

    async def body(self) -> bytes:
        """It in one piece."""
        outputs = self._outputs()
        response = await self._server().responses_full_generator(*self._arguments(outputs))
        body: str = response.model_dump_json(by_alias=True)
        return body.encode()

    def _outputs(self) -> list[RequestOutput]:
        found = []
        text = ""
        for number, token_id in enumerate(self._ids):
            whole = self._tokenizer.decode(self._ids[: number + 1])
            reason = self._finish_reason if number + 1 == len(self._ids) else None
            new, text = whole.removeprefix(text), whole
            probabilities: Any = [{token_id: Logprob(-0.5, decoded_token=new)}]
            choice = CompletionOutput(
                index=0,
                text=new,
                token_ids=[token_id],
                cumulative_logprob=None,
                logprobs=probabilities if self._logprobs else None,
                finish_reason=reason,
            )
            found.append(
                RequestOutput("r", None, _PROMPT, None, [choice], finished=reason is not None)
            )
        return found

    def _server(self) -> Any:
        server: Any = OpenAIServingResponses.__new__(OpenAIServingResponses)
        server.use_harmony = False
        server.enable_auto_tools = True
        server.enable_log_outputs = False
        server.return_tokens_as_token_ids = False
        server.tool_server = None
        server.enable_per_request_metrics = False
        server.parser = ParserManager.get_parser("hermes", None, True, "m")
        return server

    def _arguments(self, outputs: list[RequestOutput]) -> tuple[Any, ...]:
        request = self._request
        parser: Any = ParserManager.get_parser("hermes", None, True, "m")
        kwargs = {"chat_template_kwargs": {}, "model_config": SimpleNamespace()}
        context = SimpleContext(response_parser=parser(self._tokenizer, request.tools, **kwargs))

        async def generated() -> AsyncIterator[SimpleContext]:
            for output in outputs:
                context.append_output(output)
                yield context

        sampling = request.to_sampling_params(100)
        assert isinstance(sampling, SamplingParams)
        metadata = RequestResponseMetadata(request_id=RESPONSE_ID)
        return request, sampling, generated(), context, "m", self._tokenizer, metadata
