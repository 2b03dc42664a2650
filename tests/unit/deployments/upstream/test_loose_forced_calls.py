"""What arguments vLLM's grammar lets a call have that the request forces."""

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedFunction,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.parser import abstract_parser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from deployments.upstream.loose_forced_calls import PATCH
from tests.unit.deployments.upstream.originals import unpatched

NAMED = ChatCompletionNamedToolChoiceParam(function=ChatCompletionNamedFunction(name="look_up"))


restored = unpatched(PATCH)


def strictness(choice: Any, strict: bool | None = None) -> list[bool] | None:
    function = {"name": "look_up", "parameters": {"type": "object"}, "strict": strict}
    tool = ChatCompletionToolsParam.model_validate({"type": "function", "function": function})
    found = abstract_parser.resolve_tool_strictness([tool], choice, ToolStrictLevel.AUTO)
    return None if found is None else [one.function.strict for one in found]


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_vllm_leaves_the_arguments_of_a_forced_call_free(choice: Any) -> None:
    assert strictness(choice) == [False]


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_patched_vllm_holds_them_to_the_schema_unless_the_tool_says_otherwise(choice: Any) -> None:
    assert PATCH.apply is not None
    PATCH.apply()
    assert strictness(choice) == [True]
    assert strictness(choice, strict=False) == [False]
    assert strictness("auto") is None
