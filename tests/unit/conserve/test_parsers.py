"""The choice of vLLM's parsers for a model, by its chat template and its architecture."""

from itertools import chain
from typing import Any

import pytest

from conserve.parsers import (
    ARCHITECTURES,
    FORMATS,
    REASONING_TOKENS,
    TOOL_TOKENS,
    Prompting,
    Thinking,
    choose,
    with_parsers,
)
from conserve.settings import load
from tests.checkout import ROOT

JSON_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
XML_CALL = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
GLM_CALL = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
LLAMA_CALL = '{"name": function name, "parameters": dictionary of argument name and its value}'
V3_CALL = "<\uff5ctool▁calls▁begin\uff5c>function<\uff5ctool▁sep\uff5c>f\n```json\n{}\n```"
V31_CALL = "<\uff5ctool▁calls▁begin\uff5c>f<\uff5ctool▁sep\uff5c>{}"


@pytest.mark.parametrize(
    ("architecture", "template", "thinking", "tool", "reasoning"),
    [
        # One name, several families: what the template has of calls tells them apart.
        ("Qwen3ForCausalLM", JSON_CALL + "enable_thinking", "on", "hermes", "qwen3"),
        # Qwen3-Instruct-2507 does not reason, and with a parser would have no answers.
        ("Qwen3ForCausalLM", JSON_CALL, "unsaid", "hermes", None),
        ("Qwen3MoeForCausalLM", XML_CALL, "unsaid", "qwen3_coder", None),
        ("Qwen3_5ForConditionalGeneration", XML_CALL, "on", "qwen3_coder", "qwen3"),
        ("Qwen2ForCausalLM", JSON_CALL, "unsaid", "hermes", None),
        # QwQ, and distillates of R1: nothing switches it off.
        ("Qwen2ForCausalLM", JSON_CALL, "on", "hermes", "deepseek_r1"),
        ("LlamaForCausalLM", LLAMA_CALL, "unsaid", "llama3_json", None),
        ("LlamaForCausalLM", JSON_CALL, "unsaid", "hermes", None),
        ("LlamaForCausalLM", "[func_name1(a=b)]", "unsaid", "pythonic", None),
        ("Llama4ForConditionalGeneration", "[func_name1(a=b)]", "unsaid", "llama4_pythonic", None),
        ("MistralForCausalLM", "[TOOL_CALLS][{}]", "unsaid", "mistral", None),
        ("Mistral3ForConditionalGeneration", "[TOOL_CALLS] [THINK]", "unsaid", "mistral",
         "mistral"),
        ("DeepseekV3ForCausalLM", V3_CALL, "on", "deepseek_v3", "deepseek_r1"),
        ("DeepseekV3ForCausalLM", V31_CALL, "off", "deepseek_v31", "deepseek_v3"),
        ("DeepseekV3ForCausalLM", "<|tool_calls_section_begin|><think>", "unsaid", "kimi_k2",
         "kimi_k2"),
        ("Glm4MoeForCausalLM", GLM_CALL, "on", "glm47", "glm47"),
        ("GptOssForCausalLM", "<|channel|>analysis <|call|>", "unsaid", "openai", "openai_gptoss"),
        ("Gemma3ForConditionalGeneration", "[func_name1(a=b)]", "unsaid", "pythonic", None),
        ("Gemma4ForConditionalGeneration", "<|tool_call>call:f{}<tool_call|> <|channel>", "unsaid",
         "gemma4", "gemma4"),
        ("GraniteForCausalLM", "<|tool_call|>Here is my thought process:", "unsaid", "granite",
         "granite"),
        ("GraniteForCausalLM", XML_CALL, "on", "qwen3_coder", "granite_thinking_parser"),
        # By many hands.
        ("SmolLM3ForCausalLM", JSON_CALL + "enable_thinking", "on", "hermes", "qwen3"),
        # It reasons only if it is asked to, and Qwen's parser takes it for the other way round.
        ("Qwen3_5ForConditionalGeneration", XML_CALL, "off", "qwen3_coder", None),
    ],
)  # fmt: skip
def test_the_template_says_which(
    architecture: str, template: str, thinking: Thinking, tool: str, reasoning: str | None
) -> None:
    found = choose(Prompting((architecture,), template, thinking=thinking))
    assert (found.tool, found.reasoning, found.problem) == (tool, reasoning, None)
    assert "chat template" in found.why or architecture in found.why


@pytest.mark.parametrize(
    ("architecture", "tool", "reasoning"),
    [
        ("Qwen3ForCausalLM", "hermes", None),
        # vLLM renders these prompts by code of its own.
        ("DeepseekV32ForCausalLM", "deepseek_v32", "deepseek_v3"),
    ],
)
def test_without_a_template_the_architecture_does(
    architecture: str, tool: str, reasoning: str | None
) -> None:
    found = choose(Prompting(("Wrapped", architecture)))
    assert (found.tool, found.reasoning, found.problem) == (tool, reasoning, None)
    assert found.why == f"by its architecture, {architecture}"


def test_a_parser_whose_tokens_are_not_in_the_vocabulary_is_not_taken() -> None:
    """It would fail every request, and the engine's start."""
    asked = Prompting(("LlamaForCausalLM",), LLAMA_CALL, tokens=frozenset())
    found = choose(asked)
    assert found.tool is None
    assert found.problem is not None
    assert "set engine.tool_call_parser" in found.problem
    thinks = Prompting(("Qwen2ForCausalLM",), JSON_CALL, thinking="on", tokens=frozenset())
    assert choose(thinks).arguments() == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }


def test_a_template_for_another_parser_than_the_one_there_is_is_told() -> None:
    """Llama 4's own template asks for JSON, whose parser requires a token that Llama 4 lacks."""
    asked = Prompting(("Llama4ForConditionalGeneration",), LLAMA_CALL, tokens=frozenset())
    found = choose(asked)
    assert found.tool == "llama4_pythonic"
    assert found.problem is not None
    assert "set engine.chat_template" in found.problem


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (Prompting(("NewForCausalLM",)), "of this model (NewForCausalLM) is not known"),
        (Prompting(("Gemma3ForCausalLM",), "{{ messages }}", False), "shows it none"),
        (Prompting(("NemotronHForCausalLM",), "<TOOLCALL>[]"), "no parser of vLLM's reads"),
        (Prompting(("Cohere2ForCausalLM",), "<|START_ACTION|>"), "pip install it"),
    ],
)
def test_what_is_not_known_is_a_warning_and_no_parser(known: Prompting, why: str) -> None:
    found = choose(known)
    assert found.arguments() == {}
    assert found.problem is not None
    assert found.problem.startswith("tools are refused: ")
    assert why in found.problem


def test_a_package_that_is_there_lets_its_parser_be() -> None:
    known = Prompting(
        ("Cohere2ForCausalLM",), "<|START_ACTION|>", packages=frozenset({"cohere_melody"})
    )
    assert (choose(known).tool, choose(known).reasoning) == ("cohere_command3", "cohere_command3")


def test_a_template_without_tools_still_says_how_a_model_reasons() -> None:
    """DeepSeek's own template for V3.1 shows a model its calls, and no tools."""
    found = choose(Prompting(("DeepseekV3ForCausalLM",), V31_CALL, False, "off"))
    assert (found.tool, found.reasoning) == (None, "deepseek_v3")


QWEN3 = Prompting(("Qwen3ForCausalLM",), JSON_CALL, thinking="on")
CHOSEN = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


@pytest.mark.parametrize(
    ("given", "engine", "said"),
    [
        ({}, CHOSEN, "tool calls: hermes (by <tool_call> in its chat template); reasoning: qwen3"),
        (
            {"engine.tool_call_parser": "qwen3_coder"},
            CHOSEN | {"tool_call_parser": "qwen3_coder"},
            "tool calls: qwen3_coder (as set); reasoning: qwen3",
        ),
        (
            {"engine.reasoning_parser": ""},
            CHOSEN | {"reasoning_parser": ""},
            "tool calls: hermes (by <tool_call> in its chat template); reasoning: none (as set)",
        ),
        (
            {"engine.enable_auto_tool_choice": False},
            CHOSEN | {"enable_auto_tool_choice": False},
            "tool calls: none (enable_auto_tool_choice is off); reasoning: qwen3",
        ),
        # To vLLM an empty name is that of a parser which it does not have.
        (
            {"engine.tool_call_parser": ""},
            CHOSEN | {"enable_auto_tool_choice": False, "tool_call_parser": None},
            "tool calls: none (as set); reasoning: qwen3",
        ),
        (
            {"decoders.engine.tool_call_parser": "xlam"},
            CHOSEN,
            "tool calls: xlam (as set); reasoning: qwen3",
        ),
        (
            {"decoders.engine.tool_call_parser": None},
            CHOSEN,
            "tool calls: none (as set); reasoning: qwen3",
        ),
    ],
)
def test_what_an_operator_sets_stays(
    given: dict[str, Any], engine: dict[str, Any], said: str
) -> None:
    choice = with_parsers(load({"model": "m", **given}), QWEN3)
    assert choice.settings.engine == engine
    assert choice.said == said
    assert choice.problem is None


def test_a_role_that_has_its_own_is_told_so_and_no_other_field_is_set() -> None:
    given = load({"model": "m", "decoders.engine.tool_call_parser": "xlam"})
    assert with_parsers(given, QWEN3).settings.decoders.engine == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "xlam",
    }
    plain = with_parsers(load({"model": "m"}), QWEN3).settings
    assert plain.model_fields_set == {"model", "engine"}


def test_a_model_that_is_not_to_be_had_is_a_warning_unless_a_parser_is_set() -> None:
    choice = with_parsers(load({"model": "m"}), None, "model: not to be had")
    assert (choice.settings.engine, choice.said) == ({}, "tool calls: none; reasoning: none")
    assert choice.problem == (
        "tools are refused: model: not to be had; or set engine.tool_call_parser and "
        "engine.reasoning_parser"
    )
    given = load({"model": "m", "engine.tool_call_parser": "xlam"})
    choice = with_parsers(given, None, "model: not to be had")
    assert choice.settings.engine == {"enable_auto_tool_choice": True, "tool_call_parser": "xlam"}
    assert choice.problem is None


def test_what_is_wrong_with_a_choice_is_told_beside_it() -> None:
    known = Prompting(("Llama4ForConditionalGeneration",), LLAMA_CALL, tokens=frozenset())
    choice = with_parsers(load({"model": "m"}), known)
    assert choice.settings.engine["tool_call_parser"] == "llama4_pythonic"
    assert choice.problem == choose(known).problem
    given = load({"model": "m", "engine.tool_call_parser": "llama4_pythonic"})
    assert with_parsers(given, known).problem is None


def test_the_embedded_model_keeps_its_own() -> None:
    choice = with_parsers(load({}), None)
    assert choice.settings.engine == {}
    assert choice.said.startswith("tool calls: hermes (")


def test_tokens_are_those_of_parsers_in_the_table_and_the_page_names_every_one() -> None:
    every = [*FORMATS, *chain(*ARCHITECTURES.values())]
    tools = {one.tool for one in every if one.tool}
    reasoning = {name for one in every for name in (one.reasoning, one.on_request) if name}
    assert set(TOOL_TOKENS) <= tools
    assert set(REASONING_TOKENS) <= reasoning
    page = (ROOT / "docs/reference/models.md").read_text()
    assert [name for name in sorted(tools | reasoning) if f"`{name}`" not in page] == []
