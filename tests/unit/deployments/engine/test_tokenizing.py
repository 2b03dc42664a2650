"""vLLM's own renderer says the same of a prompt, wherever its pieces' tokens come from."""

import asyncio
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers.hf import get_cached_tokenizer

from conserve.embedded import MODEL_NAME, model_path
from conserve.tokenizing import TokenCache
from deployments.engine.tokenizing import keep_tokens
from deployments.upstream.prompt_lengths import PATCH, counting
from tests.unit.conserve.tokenizing import tokenizers as kinds
from tests.unit.deployments.upstream.originals import unpatched

patched = unpatched(PATCH, then=True)

LONG = "open the file and read it. " * 30
HISTORY = [
    {"role": "system", "content": LONG},
    {"role": "user", "content": "why? " + LONG},
    {"role": "assistant", "content": "because " + LONG},
    {"role": "user", "content": "and now?"},
]


def renderer(tokenizer: Any = None, name: str = MODEL_NAME) -> OnlineRenderer:
    """vLLM's, of an embedded model."""
    model = ModelConfig(model=str(model_path(name=name)), max_model_len=4096)
    inner = renderer_from_config(VllmConfig(model_config=model))
    if tokenizer is not None:
        inner.tokenizer = get_cached_tokenizer(tokenizer)
    return OnlineRenderer(
        model, inner, request_logger=None, chat_template=None, chat_template_content_format="auto"
    )


@pytest.fixture(scope="module")
def plain() -> OnlineRenderer:
    return renderer()


@pytest.fixture
def kept() -> tuple[OnlineRenderer, TokenCache]:
    made = renderer()
    cache = keep_tokens(made)
    assert cache is not None
    return made, cache


def chat(which: OnlineRenderer, messages: list[dict[str, str]], **more: Any) -> list[int]:
    request = ChatCompletionRequest(model="m", messages=messages, **more)
    _, (prompt,) = asyncio.run(which.render_chat(request))
    return list(prompt["prompt_token_ids"])


def completion(which: OnlineRenderer, prompt: str, **more: Any) -> list[int]:
    request = CompletionRequest(model="m", prompt=prompt, **more)
    (made,) = asyncio.run(which.render_completion(request))
    return list(made["prompt_token_ids"])


def test_a_chat_becomes_the_same_tokens_and_only_what_is_new_is_tokenized(
    plain: OnlineRenderer, kept: tuple[OnlineRenderer, TokenCache]
) -> None:
    renderer, cache = kept
    for messages in (HISTORY[:2], HISTORY, HISTORY):
        assert chat(renderer, messages) == chat(plain, messages)
    assert cache.found_tokens > len(chat(plain, HISTORY))
    before = cache.encoded_tokens
    more = [*HISTORY, {"role": "assistant", "content": LONG}, {"role": "user", "content": "end"}]
    whole = chat(plain, more)
    assert chat(renderer, more) == whole
    assert cache.encoded_tokens - before < len(whole) / 3


def test_it_is_each_salts_own(kept: tuple[OnlineRenderer, TokenCache]) -> None:
    renderer, cache = kept
    chat(renderer, HISTORY, cache_salt="one")
    assert cache.found_tokens == 0
    chat(renderer, HISTORY, cache_salt="other")
    chat(renderer, HISTORY)
    assert cache.found_tokens == 0
    chat(renderer, HISTORY, cache_salt="one")
    assert cache.found_tokens > 0


def tokenized(which: OnlineRenderer, messages: list[dict[str, str]], **more: Any) -> list[int]:
    """As `/tokenize` has it."""
    request = TokenizeChatRequest(model="m", messages=messages, **more)
    given = (request, request.messages, None, "auto", None)
    _, (prompt,) = asyncio.run(which.preprocess_chat(*given))
    return list(prompt["prompt_token_ids"])


@pytest.mark.parametrize("salt", ["one", "s" * 10_000, {"a": 1}, 7, None])
def test_a_salt_that_nobody_has_looked_at_is_none(
    plain: OnlineRenderer, kept: tuple[OnlineRenderer, TokenCache], salt: Any
) -> None:
    renderer, cache = kept
    chat(renderer, HISTORY, cache_salt="one")
    for _ in range(2):
        assert tokenized(renderer, HISTORY, cache_salt=salt) == chat(plain, HISTORY)
    assert cache.found_tokens == 0
    chat(renderer, HISTORY)
    tokenized(renderer, HISTORY, cache_salt=salt)
    assert cache.found_tokens > 0


def test_what_is_only_counted_is_not_kept(kept: tuple[OnlineRenderer, TokenCache]) -> None:
    """vLLM drops the salt of it."""
    renderer, cache = kept
    token = counting.set(True)
    try:
        chat(renderer, HISTORY)
    finally:
        counting.reset(token)
    assert cache.held_bytes == 0
    chat(renderer, HISTORY)
    assert cache.held_bytes > 0


def test_where_there_are_keys_nothing_is_kept_without_a_salt(plain: OnlineRenderer) -> None:
    made = renderer()
    cache = keep_tokens(made, salted_only=True)
    assert cache is not None
    for _ in range(2):
        assert chat(made, HISTORY) == chat(plain, HISTORY)
    assert cache.encoded_tokens == 0
    chat(made, HISTORY, cache_salt="one")
    assert cache.encoded_tokens > 0


def test_a_prompt_that_is_cut_off_is_cut_off_as_ever(
    plain: OnlineRenderer, kept: tuple[OnlineRenderer, TokenCache]
) -> None:
    renderer, cache = kept
    whole = chat(plain, HISTORY)
    for _ in range(2):
        for tokens, side in ((100, None), (100, "left"), (100, "right"), (len(whole), None)):
            options = {"truncate_prompt_tokens": tokens, "truncation_side": side}
            cut = chat(renderer, HISTORY, **options)
            assert cut == chat(plain, HISTORY, **options)
            assert len(cut) == tokens
    assert cache.encoded_tokens == 0


def test_a_prompt_that_is_too_long_is_refused_in_the_same_words(
    plain: OnlineRenderer, kept: tuple[OnlineRenderer, TokenCache]
) -> None:
    said = []
    for which, times in ((plain, 40), (kept[0], 40), (kept[0], 40), (plain, 80), (kept[0], 80)):
        with pytest.raises(Exception, match="maximum context length") as error:
            chat(which, [{"role": "user", "content": LONG * times}])
        said.append(str(error.value))
    assert kept[1].held_bytes == 0
    assert said[0] == said[1] == said[2]
    assert said[3] == said[4] != said[0]


def test_completions_too(plain: OnlineRenderer, kept: tuple[OnlineRenderer, TokenCache]) -> None:
    renderer, cache = kept
    text = f"<|im_start|>{LONG}<|im_end|>" * 3
    for special in (True, False, False):
        options = {"add_special_tokens": special}
        assert completion(renderer, text, **options) == completion(plain, text, **options)
    assert cache.found_tokens > 0


def test_what_is_added_to_a_prompt_is_added(plain: OnlineRenderer) -> None:
    """With a tokenizer that begins prompts as Llama's do."""
    backend = kinds.byte_level([*kinds.CHAT, kinds.special("<s>")])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    made = renderer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert keep_tokens(made) is not None
    text = f"{LONG}<|im_end|>{LONG}"
    for special in (True, False, True):
        found = completion(made, text, add_special_tokens=special)
        assert found == backend.encode(text, add_special_tokens=special).ids
        assert (found[0] == begin[1]) == special


class Unlike(PreTrainedTokenizerFast):
    """One that looks at what is around a special token."""

    def __call__(self, text: Any, *given: Any, **more: Any) -> Any:
        if isinstance(text, str):
            text = text.replace("a<|im_end|>", "b<|im_end|>")
        return super().__call__(text, *given, **more)


class OwnCode(PreTrainedTokenizerFast):
    """One that takes texts apart itself, as CodeLlama's does."""

    def _encode_plus(self, *given: Any, **more: Any) -> Any:
        return super()._encode_plus(*given, **more)


class Trusted(Unlike):
    """As if vLLM had made it."""


Trusted.__module__ = Unlike.__module__ = "vllm.tokenizers.other"


class Fails(PreTrainedTokenizerFast):
    """One that does not take several texts."""

    def __call__(self, text: Any, *given: Any, **more: Any) -> Any:
        return super().__call__(text.strip(), *given, **more)


Fails.__module__ = "vllm.tokenizers.other"


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(object(), id="none of Hugging Face's"),
        pytest.param(
            PreTrainedTokenizerFast(tokenizer_object=kinds.byte_level([])), id="no special tokens"
        ),
        pytest.param(
            PreTrainedTokenizerFast(tokenizer_object=kinds.byte_level(), split_special_tokens=True),
            id="special tokens are split",
        ),
        pytest.param(Trusted(tokenizer_object=kinds.byte_level()), id="pieces become others"),
        pytest.param(OwnCode(tokenizer_object=kinds.byte_level()), id="code of its own"),
        pytest.param(Fails(tokenizer_object=kinds.byte_level()), id="one that fails"),
    ],
)
def test_what_cannot_be_cut_is_tokenized_as_a_whole(tokenizer: Any) -> None:
    made = renderer()
    made.renderer.tokenizer = tokenizer
    tokenize = made.renderer._tokenize_prompt_async
    assert keep_tokens(made) is None
    assert made.renderer._tokenize_prompt_async is tokenize
