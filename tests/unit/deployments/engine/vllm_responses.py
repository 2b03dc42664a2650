"""vLLM's own answers by the Responses API, of tokens that are given: no engine, else all of it."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
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
        parser: vLLM's parser of calls.
        request: what else it asks for.
    """

    def __init__(
        self,
        text: str,
        finish_reason: str = "stop",
        logprobs: bool = False,
        parser: str = "hermes",
        **request: Any,
    ) -> None:
        self._tokenizer: Any = get_tokenizer(str(model_path()))
        self._text = text
        self._ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        self._finish_reason = finish_reason
        self._logprobs = logprobs
        include = {"include": ["message.output_text.logprobs"]} if logprobs else {}
        asked = {"model": "m", "input": "x", "request_id": RESPONSE_ID, "tools": [TOOL], **include}
        # vLLM's own store is off.
        asked["store"] = False
        self._request = ResponsesRequest(**{**asked, **request})
        self._server: Any = bare_server(
            OpenAIServingResponses,
            self._tokenizer,
            parser=ParserManager.get_parser(parser, None, True, "m"),
        )

    async def events(self) -> list[bytes]:
        """Its stream, an event each."""
        self._request.stream = True
        stream = self._server.responses_stream_generator(*self._arguments(self._outputs()))
        return [event.encode() async for event in _convert_stream_to_sse_events(stream)]

    async def body(self) -> bytes:
        """It in one piece."""
        whole = [self._output(self._text, self._ids, self._finish_reason)]
        response = await self._server.responses_full_generator(*self._arguments(whole))
        body: str = response.model_dump_json(by_alias=True)
        return body.encode()

    def _outputs(self) -> Iterator[RequestOutput]:
        text = ""
        for number, token_id in enumerate(self._ids, 1):
            whole = self._tokenizer.decode(self._ids[:number])
            new, text = whole.removeprefix(text), whole
            last = number == len(self._ids)
            yield self._output(new, [token_id], self._finish_reason if last else None)

    def _output(self, text: str, ids: Sequence[int], reason: str | None) -> RequestOutput:
        likely: Any = [
            {one: Logprob(-0.5, decoded_token=self._tokenizer.decode(one))} for one in ids
        ]
        choice = CompletionOutput(
            0, text, ids, None, likely if self._logprobs else None, finish_reason=reason
        )
        return RequestOutput("r", None, _PROMPT, None, [choice], finished=reason is not None)

    def _arguments(self, outputs: Iterable[RequestOutput]) -> tuple[Any, ...]:
        request = self._request
        parser = self._server._make_response_parser(request, self._tokenizer, {})
        context = SimpleContext(response_parser=parser)

        async def generated() -> AsyncIterator[SimpleContext]:
            for output in outputs:
                context.append_output(output)
                yield context

        sampling = request.to_sampling_params(100)
        assert isinstance(sampling, SamplingParams)
        metadata = RequestResponseMetadata(request_id=RESPONSE_ID)
        return request, sampling, generated(), context, "m", self._tokenizer, metadata


def bare_server(kind: type[Any], tokenizer: Any, **more: Any) -> Any:
    """One of vLLM's servers, of which that is there by which it makes answers of outputs."""
    server = kind.__new__(kind)
    about = {
        "renderer": SimpleNamespace(get_tokenizer=lambda: tokenizer, tokenizer=tokenizer),
        "model_config": None,
        "use_harmony": False,
        "tool_server": None,
        "enable_auto_tools": True,
        "return_tokens_as_token_ids": False,
        "response_role": "assistant",
        "enable_force_include_usage": False,
        "enable_prompt_tokens_details": False,
        "enable_per_request_metrics": False,
        "enable_log_outputs": False,
        "enable_log_deltas": False,
        "request_logger": None,
        "system_fingerprint": None,
        "_include_reasoning_tokens_details": False,
        "_effective_chat_template_kwargs": lambda request: {},
    }
    vars(server).update(about, **more)
    return server
