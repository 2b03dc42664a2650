"""Goes on with a stream that another engine began, and lost.

The engine gets the prompt and the tokens so far as one prompt. The outputs that the client has are
put out once more, so that vLLM's parsers, usage and recognition see one whole stream; the router
leaves out the events that the client has. Text comes from vLLM's own detokenizer over all tokens,
since characters and stop strings may lie across the break.

Internals of vLLM 0.29 that are used: ``IncrementalDetokenizer``, ``EngineCoreRequest``.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from conserve.wire import Emitted


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
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

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
