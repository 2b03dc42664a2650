"""vLLM's own HTTP server, on an engine whose answers are known beforehand."""

import functools
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from vllm import CompletionOutput, RequestOutput
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.anthropic import api_router as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion import api_router as chats
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completions
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from conserve import identity, wire
from conserve.embedded import model_path
from conserve.holdings import Holdings
from conserve.settings import Settings
from conserve.turn import TurnKey
from deployments.engine.turns import skip_media_cache
from deployments.router.request import ClientRequest
from tests.unit.deployments.asgi import ask, read_turn
from tests.unit.deployments.engine.following import engine_turns

MODEL = Settings().model_id


def read(path: str, body: Any) -> ClientRequest:
    """A turn, as a router understands it.

    Raises:
        ApiError: the router refuses it.
    """
    return read_turn(path, body)


_SHARED: dict[str, Any] = {
    "request_logger": None,
    "chat_template_content_format": "auto",
    "enable_auto_tools": True,
    "tool_parser": "hermes",
}
_HANDLERS: dict[str, tuple[Any, str, Any]] = {
    "chat": (chats, "openai_serving_chat", OpenAIServingChat),
    "messages": (anthropic, "anthropic_serving_messages", AnthropicServingMessages),
    "responses": (responses, "openai_serving_responses", OpenAIServingResponses),
    "completion": (completions, "openai_serving_completion", OpenAIServingCompletion),
}


class Client:
    """Stands in for vLLM's ``AsyncLLM``, on the embedded model's tokenizer and template."""

    errored = False

    def __init__(self, model: ModelConfig, renderer: Any) -> None:
        self.model_config, self.renderer = model, renderer
        self.online = OnlineRenderer(model, renderer, chat_template=None, **_SHARED)

    def check_admission(self, n: int) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False

    def app(self, *apis: str, **more: Any) -> FastAPI:
        """Return vLLM's app of some APIs; ``more`` is for its servers of chats and Messages."""
        client: Any = self
        models = OpenAIServingModels(client, [BaseModelPath(MODEL, str(model_path()))])
        app = FastAPI()
        for api in apis:
            router, name, serving = _HANDLERS[api]
            options = {"online_renderer": self.online, "request_logger": None}
            if api != "completion":
                template = self.renderer.tokenizer.chat_template
                options |= {**_SHARED, "chat_template": template, **more}
            role = ("assistant",) if api in ("chat", "messages") else ()
            app.include_router(router.router)
            setattr(app.state, name, serving(client, models, *role, **options))
        app.state.enable_server_load_tracking = False
        app.state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
        init_exception_handler(app)
        return app


class Server(Client):
    """A decoder's HTTP app on the embedded model's tokenizer and template.

    Args:
        answer: texts that every answer is generated in.
        finish_reason: why it ends.
        stop_reason: the stop string, if that is why.
        cached_tokens: of the prompt, as the engine says of each output.

    Attributes:
        prompts: token ids of each prompt that the engine was given.
        history_id: of the turns that are served, which nobody has named.
    """

    def __init__(
        self,
        answer: Sequence[str] = ("on", " it"),
        finish_reason: str = "length",
        stop_reason: str | None = None,
        cached_tokens: int = 3,
    ) -> None:
        self._answer = answer
        self._finish_reason = finish_reason
        self._stop_reason = stop_reason
        self._cached_tokens = cached_tokens
        self.prompts: list[list[int]] = []
        super().__init__(*renderer())
        self.input_processor = self
        self.tokenizer = self.renderer.tokenizer
        self.holdings = Holdings()
        self.history_id = identity.new_id()
        app = self.app("chat", "messages", enable_prompt_tokens_details=True)
        skip_media_cache(self.online)
        self._app = engine_turns(app, self, holdings=self.holdings)

    def process_inputs(self, request_id: str, prompt: Any, *_: Any, **options: Any) -> Any:
        return SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], mm_features=[])

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        ids = list(prompt["prompt_token_ids"])
        self.prompts.append(ids)
        delta = params.output_kind.name == "DELTA"
        whole = "".join(self._answer)
        texts = self._answer if delta else [whole]
        for number, text in enumerate(texts):
            last = number == len(texts) - 1
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            choice = CompletionOutput(0, text, tokens, None, None)
            if last:
                choice.finish_reason, choice.stop_reason = self._finish_reason, self._stop_reason
            yield RequestOutput(
                request_id, None, ids, None, [choice], last,
                num_cached_tokens=self._cached_tokens, num_cache_creation_tokens=0,
            )  # fmt: skip

    @property
    def prompt(self) -> str:
        """The last prompt that the engine was given, as text."""
        said: str = self.tokenizer.decode(self.prompts[-1])
        return said

    def serve(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Have a turn served that comes by a router.

        Args:
            more: of what the router tells (`wire.DecoderTurn`).

        Raises:
            ApiError: the router refuses it.
        """
        asked = read(path, body)
        key = TurnKey(self.history_id, 1, 256)
        chain = asked.chain
        if chain is not None:
            more |= {"root": chain.root, "beginning": chain.beginning}
        told = wire.DecoderTurn(key, **more)
        return self.post(path, asked.raw, {wire.TURN_HEADER: told.header()})

    def post(self, path: str, raw: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        """Send a request to the engine."""
        given = {"content-type": "application/json", **(headers or {})}
        return ask(self._app, "POST", path, content=raw, headers=given)

    def knows(self, path: str, body: Any) -> bool:
        """Whether a turn is plainly the next one of the history that was served here."""
        chain = read(path, body).chain
        assert chain is not None
        return any(self.holdings.continued(chain.root, end, None) for end in chain.ends)


@functools.cache
def renderer() -> tuple[ModelConfig, Any]:
    """Return the embedded model's configuration and renderer; they are shared."""
    return new_renderer(4096)


def new_renderer(context: int) -> tuple[ModelConfig, Any]:
    model = ModelConfig(
        model=str(model_path()), served_model_name=MODEL, max_model_len=context, dtype="float32"
    )
    return model, renderer_from_config(VllmConfig(model_config=model))


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events."""
    assert response.status_code == 200, response.text
    found = [event.partition("data: ")[2] for event in response.text.split("\n\n")]
    return [json.loads(data) for data in found if data and data != "[DONE]"]
