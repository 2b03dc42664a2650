"""vLLM's renderer, made to tokenize only what is new of each prompt, and clients' text as text.

Prompts are never cut here: see `deployments.upstream.prompt_lengths`.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import TokenizersBackend
from vllm.logger import init_logger
from vllm.renderers.cohere import CohereRenderer
from vllm.renderers.deepseek_v4 import DeepseekV4Renderer
from vllm.renderers.deepseek_v32 import DeepseekV32Renderer
from vllm.renderers.hf import HfRenderer
from vllm.utils.async_utils import make_async

from conserve.tokenizing import Encode, Pieces, TextMarks, TokenCache, special_tokens
from deployments.upstream.prompt_lengths import counting

logger = init_logger(__name__)

# Some 100 million characters of source text: the histories of hundreds of coding agents.
KEPT_MB = 256

_RENDERING = ("render_chat", "render_completion", "preprocess_chat")
# The others make tokens of messages themselves.
_MAKE_TEXT = (HfRenderer, DeepseekV32Renderer, DeepseekV4Renderer, CohereRenderer)

# Texts that are tokenized in both ways at the start, between special tokens: letters, numbers and
# spaces at the ends of a piece, and what normalizers change.
_TRIALS = ("", " ", "a", " a ", "\n\nA1, b  \n", "  12345 é\u0301 ﬁ\u200b", "user\n<|", "日本語 \t")
_MOST_TRIED = 64


class _Request(NamedTuple):
    """The request whose prompt is being rendered.

    Attributes:
        salt: its ``cache_salt``; empty without one.
        keeps: whether its pieces may be kept. vLLM ignores the salt of requests that only count.
    """

    salt: str = ""
    keeps: bool = False


_NOBODYS = _Request()
_request: ContextVar[_Request] = ContextVar("conserve_rendered_request", default=_NOBODYS)


def keep_text(renderer: Any) -> Encode | None:
    """Have an engine's HTTP app take chats' messages and tools for text, without control tokens.

    Returns what tokenizes texts that may have marks; None where vLLM's own code for the model keeps
    text, or where it cannot be kept.
    """
    inner = renderer.renderer
    marks = TextMarks((getattr(inner.tokenizer, "added_tokens_decoder", None) or {}).values())
    makes_tokens = not isinstance(inner, _MAKE_TEXT) or inner.model_config.enable_prompt_embeds
    if makes_tokens or not marks.control:
        return None
    encode = _encode_marked(inner.tokenizer, marks)
    render, tokenize = inner.render_messages_async, inner._tokenize_prompt_async
    build = inner._build_tokens_prompt
    mark_both = make_async(
        lambda messages, values: (marks.messages(messages), marks.values(values)),
        executor=inner._executor,
    )
    encode_whole = make_async(encode, executor=inner._executor)

    async def rendered(messages: Any, params: Any) -> Any:
        messages, values = await mark_both(messages, params.chat_template_kwargs)
        said, prompt = await render(messages, replace(params, chat_template_kwargs=values))
        return marks.removed(said) if marks.mark in prompt["prompt"] else said, prompt

    async def tokenized(prompt: Any, params: Any) -> Any:
        if marks.mark not in prompt["prompt"]:
            return await tokenize(prompt, params)
        special = params.get_encode_kwargs()["add_special_tokens"]
        (ids,) = await encode_whole([prompt["prompt"]], special)
        return inner._build_tokens_prompt(ids, prompt)

    def built(ids: Any, prompt: Any, **more: Any) -> Any:
        return build(ids, {**prompt, "prompt": marks.removed(prompt["prompt"])}, **more)

    inner.render_messages_async, inner._tokenize_prompt_async = rendered, tokenized
    inner._build_tokens_prompt = built
    return encode


def _encode_marked(tokenizer: Any, marks: TextMarks) -> Callable[..., list[list[int]]]:
    """Return what tokenizes texts as if they had no marks, and as text what is marked."""
    try:
        made = _removing(marks, _backend(tokenizer))
    except ValueError as error:
        logger.info("text with control tokens is tokenized in parts: %s", error)
        made = None

    def encode(texts: list[str], special: bool = False) -> list[list[int]]:
        if not any(marks.mark in text for text in texts):
            return _encode(tokenizer, texts)
        if made is not None:
            encoded = made.encode_batch_fast(texts, add_special_tokens=special)
            return [one.ids for one in encoded]
        parts = (_encode(tokenizer, text.split(marks.mark)) for text in texts)
        return [[*chain.from_iterable(ids)] for ids in parts]

    return encode


def _removing(marks: TextMarks, backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer that removes marks after it has looked for control tokens."""
    made = Tokenizer(backend.model)  # It shares the vocabulary.
    own = [] if backend.normalizer is None else [backend.normalizer]
    made.normalizer = normalizers.Sequence([normalizers.Replace(marks.mark, ""), *own])
    made.pre_tokenizer, made.post_processor = backend.pre_tokenizer, backend.post_processor
    added = backend.get_added_tokens_decoder()
    for _, one in sorted(added.items()):
        how = {name: getattr(one, name) for name in ("single_word", "lstrip", "rstrip", "special")}
        # Those of `normalized` are found in the text without marks.
        normalized = one.normalized and one.content not in marks.control
        made.add_tokens([AddedToken(one.content, normalized=normalized, **how)])
    if made.get_added_tokens_decoder().keys() != added.keys():
        raise ValueError("its added tokens have other ids")
    return made


def keep_tokens(
    renderer: Any,
    most_mb: int = KEPT_MB,
    salted_only: bool = False,
    encode_marked: Encode | None = None,
) -> TokenCache | None:
    """Have an engine's HTTP app keep the tokens of what it has tokenized, apart by ``cache_salt``.

    With ``salted_only`` nothing is kept or found for a request without a salt; ``encode_marked`` is
    `keep_text`'s. Returns None if nothing is kept, or if this tokenizer's prompts cannot be cut.
    """
    inner = renderer.renderer
    tokenizer = inner.tokenizer
    if not most_mb or tokenizer is None:
        return None
    try:
        pieces, encode = cut_by(tokenizer)
    except ValueError as error:
        logger.info("prompts are tokenized as a whole: %s", error)
        return None
    except Exception:
        # A tokenizer's own code may raise anything, and the engine can do without.
        logger.warning("prompts are tokenized as a whole; please report this:", exc_info=True)
        return None
    cache = TokenCache(pieces, encode_marked or encode, most_mb * 10**6)
    whole = inner._tokenize_prompt_async
    in_pieces = make_async(cache.tokens, executor=inner._executor)

    async def tokenize(prompt: Any, params: Any) -> Any:
        request, asked = _request.get(), params.get_encode_kwargs()
        if (
            (salted_only and not request.salt)
            or asked["add_special_tokens"]
            or params.truncate_prompt_tokens is not None
            or inner._wants_offsets(prompt, params)
        ):
            return await whole(prompt, params)
        # Longer prompts are refused.
        most = params.max_total_tokens
        ids = await in_pieces(prompt["prompt"], request.salt, request.keeps, most)
        return inner._build_tokens_prompt(ids, prompt)

    inner._tokenize_prompt_async = tokenize
    for name in _RENDERING:
        setattr(renderer, name, _noted(getattr(renderer, name)))
    return cache


def _noted(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(render)
    async def rendered(request: Any, *given: Any, **more: Any) -> Any:
        # Other models take any member of this name unchecked.
        has_salt = "cache_salt" in getattr(type(request), "model_fields", ())
        salt = request.cache_salt if has_salt else None
        before = _request.set(_Request(salt or "", has_salt and not counting.get()))
        try:
            return await render(request, *given, **more)
        finally:
            _request.reset(before)

    return rendered


def cut_by(tokenizer: Any) -> tuple[Pieces, Encode]:
    """Return how a tokenizer's prompts are cut, and what makes tokens of the pieces.

    Raises `ValueError` where they cannot be cut.
    """
    tokens = special_tokens(_backend(tokenizer).get_added_tokens_decoder().values())
    tried = Pieces(tokens, least=1)
    if not tried.cuts:
        raise ValueError("the tokenizer has no special tokens")
    encode = functools.partial(_encode, tokenizer)
    text = "".join(before + token.content for token in tokens[:_MOST_TRIED] for before in _TRIALS)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if [id_ for ids in encode([*tried.of(text)]) for id_ in ids] != whole:
        raise ValueError("pieces became other tokens; please report this with the model's name")
    return Pieces(tokens), encode


def _backend(tokenizer: Any) -> Tokenizer:
    """Return what does all of a tokenizer's work; ValueError if other code takes part in it."""
    if not isinstance(tokenizer, TokenizersBackend):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer of Hugging Face's")
    backend = tokenizer.backend_tokenizer
    if type(backend) is not Tokenizer:
        raise ValueError(f"the tokenizer is that of {type(backend).__module__}")
    if own := _own_code(type(tokenizer)):
        raise ValueError(f"{own} changes texts by code of its own")
    if tokenizer.split_special_tokens or backend.encode_special_tokens:
        raise ValueError("the tokenizer splits its special tokens")
    return backend


def _own_code(tokenizer: type) -> str | None:
    """Return the class that changes texts before Hugging Face's own code, as CodeLlama's does."""
    for one in tokenizer.__mro__:
        if one is TokenizersBackend:
            break
        if (
            not one.__module__.startswith("vllm.")
            and {"__call__", "_encode_plus"} & vars(one).keys()
        ):
            return one.__name__
    return None


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer(
        texts, add_special_tokens=False, truncation=False, padding=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids
