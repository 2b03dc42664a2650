"""What a model may put out for a request with tools and a format of the answer."""

import functools
import json
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager

from conserve.embedded import model_path
from deployments.upstream import loose_forced_calls
from deployments.upstream.uncallable_tools import PATCH
from tests.unit.deployments.upstream.originals import unpatched

restored = unpatched(PATCH, loose_forced_calls.PATCH)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {"on": {}}}}
ANSWER = '{"n": 3}'
# How each parser's models call, of those with a grammar of their calls and of one without.
CALLS = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"on": true}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=on>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>",
    "phi4_mini_json": 'functools[{"name": "look_up", "arguments": {"on": true}}]',
}


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


def taken(parser: str, choice: str, *texts: str, responds: bool = False) -> list[bool]:
    """Whether each text is one that the request's grammar takes, as a whole output."""
    if responds:
        kind, form = ResponsesRequest, {"format": {"type": "json_schema", "name": "r"}}
        form["format"]["schema"] = SCHEMA  # type: ignore[assignment]
        given: dict[str, Any] = {
            "input": "a",
            "text": form,
            "tools": [{"type": "function", **FUNCTION}],
        }
    else:
        kind = ChatCompletionRequest  # type: ignore[assignment]
        wanted = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
        given = {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": wanted,
            "tools": [{"type": "function", "function": FUNCTION}],
        }
    request = kind.model_validate({**given, "model": "m", "tool_choice": choice})
    made = ParserManager.get_parser(tool_parser_name=parser, enable_auto_tools=True)
    assert made is not None
    outputs = made(tokenizer(), request.tools).adjust_request(request).extract_structured_outputs()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    if outputs.structural_tag:
        grammar = compiler.compile_structural_tag(outputs.structural_tag)
    else:
        grammar = compiler.compile_json_schema(json.dumps(outputs.json))

    def takes(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        ids = tokenizer().encode(text, add_special_tokens=False)
        return all(map(matcher.accept_token, [*ids, info.stop_token_ids[0]]))

    return [takes(text) for text in texts]


def patched() -> None:
    for patch in (loose_forced_calls.PATCH, PATCH):
        assert patch.apply is not None
        patch.apply()


@pytest.mark.parametrize("parser", CALLS)
def test_vllm_forbids_calls_where_the_answer_has_a_format(parser: str) -> None:
    assert taken(parser, "auto", CALLS[parser], ANSWER) == [False, True]


@pytest.mark.parametrize("responds", [False, True])
@pytest.mark.parametrize("parser", CALLS)
def test_a_model_calls_or_answers_in_the_format(parser: str, responds: bool) -> None:
    patched()
    said = taken(parser, "auto", CALLS[parser], ANSWER, "It is on.", responds=responds)
    assert said == [True, True, False]


def test_a_choice_of_tools_stands_above_the_format() -> None:
    patched()
    assert taken("hermes", "auto", CALLS["hermes"] * 2) == [True]
    assert taken("hermes", "required", CALLS["hermes"], ANSWER) == [True, False]
    assert taken("hermes", "none", CALLS["hermes"], ANSWER) == [False, True]


def test_what_cannot_be_held_is_refused() -> None:
    patched()
    with pytest.raises(VLLMValidationError, match="send either tools or a format"):
        taken("gigachat3", "auto", ANSWER)
