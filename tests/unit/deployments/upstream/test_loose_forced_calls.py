"""What arguments vLLM's grammar lets a call have that the request forces."""

from typing import Any

import pytest
import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedFunction,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.parser import abstract_parser
from vllm.tool_parsers import structural_tag_registry as registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from xgrammar.testing import _is_grammar_accept_string

NAMED = ChatCompletionNamedToolChoiceParam(function=ChatCompletionNamedFunction(name="look_up"))


def tool(strict: bool | None, parameters: Any) -> ChatCompletionToolsParam:
    function = {"name": "look_up", "parameters": parameters, "strict": strict}
    return ChatCompletionToolsParam.model_validate({"type": "function", "function": function})


def strictness(choice: Any, strict: bool | None = None) -> list[bool] | None:
    tools = [tool(strict, {"type": "object"})]
    found = abstract_parser.resolve_tool_strictness(tools, choice, ToolStrictLevel.AUTO)
    return None if found is None else [one.function.strict for one in found]


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_vllm_leaves_the_arguments_of_a_forced_call_free(choice: Any) -> None:
    assert strictness(choice) == [False]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_patched_vllm_holds_them_to_the_schema_unless_the_tool_says_otherwise(choice: Any) -> None:
    assert strictness(choice) == [True]
    assert strictness(choice, strict=False) == [False]
    assert strictness("auto") is None


CALLS = {
    "hermes": '<tool_call>{{"name": "look_up", "arguments": {}}}</tool_call>',
    "llama": '{{"name": "look_up", "parameters": {}}}',
    "harmony": "<|channel|>commentary to=functions.look_up json<|message|>{}",
}


def taken(model: str, strict: bool | None, parameters: Any) -> list[str]:
    """The arguments that a grammar of forced calls takes of a number and two objects."""
    tools = [tool(strict, parameters)]
    tag = registry.get_model_structural_tag(model, tools, "required", False)
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    every = ("5", "{}", '{"a": 1}')
    return [one for one in every if _is_grammar_accept_string(grammar, CALLS[model].format(one))]


@pytest.mark.parametrize("model", CALLS)
def test_vllm_takes_a_number_for_the_arguments_of_a_tool_without_parameters(model: str) -> None:
    assert taken(model, None, None) == ["5", "{}", '{"a": 1}']


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("model", CALLS)
@pytest.mark.parametrize("parameters", [None, {}])
def test_patched_vllm_takes_an_object_for_them(model: str, parameters: Any) -> None:
    assert taken(model, None, parameters) == taken(model, True, parameters) == ["{}"]
    assert taken(model, False, parameters) == ["{}", '{"a": 1}']
