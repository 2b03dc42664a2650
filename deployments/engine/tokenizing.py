"""vLLM's renderer, made to tokenize only what is new of each prompt, and clients' text as text.

Prompts are never cut here: see `deployments.upstream.prompt_lengths`.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import TokenizersBackend
from vllm.logger import init_logger
from vllm.utils.async_utils import make_async

from conserve.tokenizing import Encode, Pieces, TextMarks, TokenCache, special_tokens
from deployments.upstream.prompt_lengths import counting

logger = init_logger(__name__)

# Some 100 million characters of source text: the histories of hundreds of coding agents.
KEPT_MB = 256

_RENDERING = ("render_chat", "render_completion", "preprocess_chat")
# vLLM's modules of renderers that make text of messages. The others make tokens of them.
_MAKE_TEXT = ("hf", "deepseek_v32", "deepseek_v4", "cohere")

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


def keep_text(renderer: Any) -> None:
    """Have an engine's HTTP app take chats' messages and tools for text, without control tokens.

    It is called before `keep_tokens`. For some models vLLM makes tokens of messages itself, and
    nothing changes.
    """
    inner = renderer.renderer
    marks = TextMarks((getattr(inner.tokenizer, "added_tokens_decoder", None) or {}).values())
    makes_text = inner.__module__.rpartition(".")[2] in _MAKE_TEXT
    if not (marks.control and makes_text) or inner.model_config.enable_prompt_embeds:
        return
    render, build = inner.render_messages_async, inner._build_tokens_prompt

    async def rendered(messages: Any, params: Any) -> Any:
        given = params.chat_template_kwargs
        # Not by the renderer's own threads, where it would wait for others' prompts.
        messages, values = await asyncio.to_thread(marks.chat, messages, given)
        said, prompt = await render(messages, replace(params, chat_template_kwargs=values))
        # A client may have its last message echoed.
        return [*said[:-1], *marks.removed(said[-1:])], prompt

    def built(ids: Any, prompt: Any, **more: Any) -> Any:
        return build(ids, {**prompt, "prompt": marks.removed(prompt["prompt"])}, **more)

    inner.render_messages_async, inner._build_tokens_prompt = rendered, built
    _take_marks(inner.tokenizer, marks)


def _take_marks(tokenizer: Any, marks: TextMarks) -> None:
    """Have a tokenizer take what is marked for text, and leave the marks out.

    Its class is changed, as vLLM does that: a copy would share its state.
    """
    made: Tokenizer | None = None
    with suppress(Exception):  # It does not work as Hugging Face's do; `keep_tokens` logs why.
        cut_by(tokenizer)
        made = _removing(marks, tokenizer.backend_tokenizer)

    class TakesMarks(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: Any, **how: Any) -> Any:
            texts = [text] if isinstance(text, str) else text
            if not any(marks.mark in one for one in texts):
                return super().__call__(text, **how)
            if made is None:
                # A part has no whole control token.
                parts = (_encode(tokenizer, one.split(marks.mark)) for one in texts)
                ids = [[*chain.from_iterable(one)] for one in parts]
            else:
                special = how["add_special_tokens"]
                encoded = made.encode_batch_fast(texts, add_special_tokens=special)
                ids = [one.ids for one in encoded]
            return {"input_ids": ids if texts is text else ids[0], "offset_mapping": None}

    tokenizer.__class__ = TakesMarks


def _removing(marks: TextMarks, backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer that removes marks after it has looked for control tokens."""
    made = Tokenizer(backend.model)  # It shares the vocabulary.
    own = [] if backend.normalizer is None else [backend.normalizer]
    made.normalizer = normalizers.Sequence([normalizers.Replace(marks.mark, ""), *own])
    made.pre_tokenizer, made.post_processor = backend.pre_tokenizer, backend.post_processor
    added = backend.get_added_tokens_decoder()
    for _, one in sorted(added.items()):
        said = one.__getstate__()
        # Those of `normalized` are looked for after marks are removed.
        said["normalized"] &= one.content not in marks.control
        made.add_tokens([AddedToken(**said)])
    if made.get_added_tokens_decoder().keys() != added.keys():
        raise ValueError("its added tokens have other ids")
    return made


def keep_tokens(renderer: Any, salted_only: bool = False) -> TokenCache | None:
    """Have an engine's HTTP app keep the tokens of what it has tokenized, apart by ``cache_salt``.

    With ``salted_only`` nothing is kept or found for a request without a salt. Returns None if
    nothing is kept, or if this tokenizer's prompts cannot be cut.
    """
    inner = renderer.renderer
    tokenizer = inner.tokenizer
    if tokenizer is None:
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
    cache = TokenCache(pieces, encode, KEPT_MB * 10**6)
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
    if not isinstance(tokenizer, TokenizersBackend):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer of Hugging Face's")
    backend = tokenizer.backend_tokenizer
    if type(backend) is not Tokenizer:
        raise ValueError(f"the tokenizer is that of {type(backend).__module__}")
    if own := _own_code(type(tokenizer)):
        raise ValueError(f"{own} changes texts by code of its own")
    if tokenizer.split_special_tokens or backend.encode_special_tokens:
        raise ValueError("the tokenizer splits its special tokens")
    tokens = special_tokens(backend.get_added_tokens_decoder().values())
    tried = Pieces(tokens, least=1)
    if not tried.cuts:
        raise ValueError("the tokenizer has no special tokens")
    encode = functools.partial(_encode, tokenizer)
    text = "".join(before + token.content for token in tokens[:_MOST_TRIED] for before in _TRIALS)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if [id_ for ids in encode([*tried.of(text)]) for id_ in ids] != whole:
        raise ValueError("pieces became other tokens; please report this with the model's name")
    return Pieces(tokens), encode


def _own_code(tokenizer: type) -> str | None:
    """Return the class that changes texts before Hugging Face's own code, as CodeLlama's does."""
    for one in tokenizer.__mro__:
        if one is TokenizersBackend:
            break
        if (
            not one.__module__.startswith(("vllm.", __name__))
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
