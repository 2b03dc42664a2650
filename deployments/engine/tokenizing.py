"""vLLM's renderer, which tokenizes all of each prompt, made to tokenize what is new of it.

Internals of vLLM 0.29 that are used: ``OnlineRenderer`` (``render_chat``, ``render_completion``,
``preprocess_chat``, ``renderer``), and of that ``_tokenize_prompt_async``, ``_executor``,
``_wants_offsets`` and ``_build_tokens_prompt``. Prompts are never cut here: see `lengths`.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import TokenizersBackend
from vllm.logger import init_logger
from vllm.utils.async_utils import make_async

from conserve.tokenizing import Encode, Pieces, TokenCache, special_tokens
from deployments.engine.check import only_counts

logger = init_logger(__name__)

# Some 100 million characters of source text: the histories of hundreds of coding agents.
KEPT_MB = 256

_RENDERING = ("render_chat", "render_completion", "preprocess_chat")

# What is tokenized in both ways before any prompt is, between special tokens: letters, numbers and
# spaces at the beginning and the end of a piece, and what normalizers change.
_TRIALS = ("", " ", "a", " a ", "\n\nA1, b  \n", "  12345 é\u0301 ﬁ\u200b", "user\n<|", "日本語 \t")
_MOST_TRIED = 64


class _Request(NamedTuple):
    """Knows whose prompt is being rendered.

    Attributes:
        salt: under which the engine keeps its KV; empty without one.
        keeps: whether its pieces may be kept. Of what is only counted or tokenized it is not known
            whose it is: vLLM forgets, or does not look at, the salt.
    """

    salt: str = ""
    keeps: bool = False


_NOBODYS = _Request()
_request: ContextVar[_Request] = ContextVar("conserve_rendered_request", default=_NOBODYS)


def keep_tokens(
    renderer: Any, most_mb: int = KEPT_MB, salted_only: bool = False
) -> TokenCache | None:
    """Have an engine's HTTP app keep the tokens of what it has tokenized.

    What was tokenized under one ``cache_salt`` is not found under another.

    Args:
        renderer: the ``OnlineRenderer`` of the app.
        most_mb: of host memory, in MB.
        salted_only: keep and find nothing for a request without a salt: it may be anybody's.

    Returns:
        What is kept, or None: nothing was to be, or this tokenizer's prompts cannot be cut.
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
        # Whatever a tokenizer's own code makes of the trial, the engine can do without.
        logger.warning("prompts are tokenized as a whole; please report this:", exc_info=True)
        return None
    cache = TokenCache(pieces, encode, most_mb * 10**6)
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
        # What is longer is refused.
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
        # Others take any member that a client thinks of, without a look at it.
        has_salt = "cache_salt" in getattr(type(request), "model_fields", ())
        salt = request.cache_salt if has_salt else None
        before = _request.set(_Request(salt or "", has_salt and not only_counts()))
        try:
            return await render(request, *given, **more)
        finally:
            _request.reset(before)

    return rendered


def cut_by(tokenizer: Any) -> tuple[Pieces, Encode]:
    """How a tokenizer's prompts are cut, and what makes tokens of the pieces.

    Raises:
        ValueError: they cannot be, and why.
    """
    if not isinstance(tokenizer, TokenizersBackend):
        raise ValueError(f"{type(tokenizer).__name__} is none of Hugging Face's fast tokenizers")
    backend = tokenizer.backend_tokenizer
    if type(backend) is not Tokenizer:
        raise ValueError(f"it is done by {type(backend).__module__}")
    if own := _own_code(type(tokenizer)):
        raise ValueError(f"{own} has code of its own for texts")
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
    """The class that does something to texts before Hugging Face's own code gets them.

    vLLM's change nothing; CodeLlama's, say, takes a text apart that is not in a list.
    """
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
