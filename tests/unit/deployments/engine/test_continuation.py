"""Streams cut anywhere and continued: what comes out is what would have come out without a cut.

vLLM's own detokenizer puts out both; the engine is a fixed sequence of tokens.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from conserve.embedded import model_path
from conserve.wire import Emitted, note, read_notes
from deployments.engine.turn import can_be_continued, continued

# Characters of several bytes are several tokens of the embedded model, and so are all words.
TEXT = "naïve café: 東京 — 😀 done. Then STOP and more"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(str(model_path()))


def _params(**options: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": 400, **options}
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **given)


class Engine:
    """Generates the same tokens whatever it is asked, from where the prompt leaves off."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int], answer: list[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._answer = answer
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.closed = False

    async def generate(self, prompt: dict[str, Any], params: Any) -> AsyncIterator[RequestOutput]:
        ids = prompt["prompt_token_ids"]
        self.asked.append((ids, params))
        assert ids[: len(self._prompt_ids)] == self._prompt_ids
        done = ids[len(self._prompt_ids) :]
        assert done == self._answer[: len(done)]
        request = EngineCoreRequest("r", ids, None, params, None, 0.0, None, None, None)
        detokenizer = IncrementalDetokenizer.from_new_request(
            self._tokenizer if params.detokenize else None, request
        )
        try:
            # After its end an engine would go on with something.
            left = self._answer[len(done) :] or self._answer[:1]
            for produced, token in enumerate(left, start=1):
                last = len(done) + produced == len(self._answer)
                reason = "stop" if last else ("length" if produced == params.max_tokens else None)
                found = detokenizer.update([token], reason == "stop")
                reason = "stop" if found else reason
                text = detokenizer.get_next_output_text(reason is not None, delta=True)
                choice = CompletionOutput(
                    0, text, [token], None, None, finish_reason=reason, stop_reason=found
                )
                yield RequestOutput("r", None, ids, None, [choice], reason is not None)
                if reason is not None:
                    return
        finally:
            self.closed = True


async def _all(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


def _shown(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    shown = []
    for one in outputs:
        (choice,) = one.outputs
        end = choice.finish_reason, choice.stop_reason, one.finished
        shown.append((list(choice.token_ids), choice.text, *end, one.prompt_token_ids))
    return shown


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ["STOP"]},
        {"stop": ["STOP"], "include_stop_str_in_output": True},
        {"stop": ["done", "東京 — 😀"], "min_tokens": 30},
        {"max_tokens": 25},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    ],
)
async def test_a_stream_cut_anywhere_goes_on_as_if_it_had_not_been_cut(
    tokenizer: Any, options: dict[str, Any]
) -> None:
    prompt_ids = tokenizer.encode("a prompt, and é")
    answer = [*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id]
    prompt = {"type": "token", "prompt_token_ids": prompt_ids}
    params = _params(**options)
    assert can_be_continued(prompt, params)
    whole = await _all(Engine(tokenizer, prompt_ids, answer).generate(prompt, params))
    assert len(whole) > 20
    emitted = [
        Emitted(one.outputs[0].token_ids, one.outputs[0].finish_reason, one.outputs[0].stop_reason)
        for one in whole
    ]
    for cut in range(1, len(whole) + 1):
        sent = read_notes(b"".join(note([one]) for one in emitted[:cut]))
        engine = Engine(tokenizer, prompt_ids, answer)
        seen: list[Any] = []
        stream = continued(
            sent, prompt, params, "r", tokenizer, generate=engine.generate, see=seen.append
        )
        assert _shown(await _all(stream)) == _shown(whole), cut
        # The engine had what was sent as its prompt, and all it did was seen to its end.
        ((ids, asked),) = engine.asked
        # (Of a finished answer without its last one, which had no KV either.)
        assert len(ids) == len(prompt_ids) + cut - (cut == len(whole))
        assert seen[-1].finished
        assert engine.closed
        assert asked.max_tokens == (1 if cut == len(whole) else params.max_tokens - cut)
    # What the client asked for is left as it was.
    assert params.max_tokens == options.get("max_tokens", 400)
    assert params.detokenize


async def test_outputs_of_several_tokens_are_put_out_together_again(tokenizer: Any) -> None:
    """The events that a client has are counted, so they have to fall as they fell."""
    prompt_ids = tokenizer.encode("p")
    answer = tokenizer.encode(TEXT, add_special_tokens=False)
    prompt = {"type": "token", "prompt_token_ids": prompt_ids}
    run = Engine(tokenizer, prompt_ids, answer).generate
    sent = [Emitted(answer[:1]), Emitted(answer[1:9]), Emitted(answer[9:12])]
    outputs = await _all(
        continued(sent, prompt, _params(), "r", tokenizer, generate=run, see=lambda _: None)
    )
    assert [list(one.outputs[0].token_ids) for one in outputs[:3]] == [one[0] for one in sent]
    text = "".join(one.outputs[0].text for one in outputs)
    assert text == tokenizer.decode(answer[:-1])


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "temperature": 0.7},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"bad_words": ["no"]},
        {"seed": 7, "temperature": 0.7},
        {"extra_args": {"of_a_logits_processor": 1}},
        {"detokenize": False},
    ],
)
def test_what_depends_on_more_than_the_tokens_so_far_is_not_continued(options: Any) -> None:
    assert not can_be_continued({"type": "token", "prompt_token_ids": [1]}, _params(**options))


def test_what_comes_in_one_piece_or_without_token_ids_is_not_continued() -> None:
    prompt = {"type": "token", "prompt_token_ids": [1]}
    assert can_be_continued(prompt, _params(extra_args={"kv_transfer_params": {}}, seed=7))
    assert not can_be_continued(prompt, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    assert not can_be_continued("text", _params())
    assert not can_be_continued({"type": "embeds", "prompt_embeds": object()}, _params())
