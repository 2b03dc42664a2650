"""How a model is prompted, read from its files; and the table of parsers against vLLM's own."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from conserve.embedded import write_checkpoint
from conserve.parsers import (
    ARCHITECTURES,
    FORMATS,
    PACKAGES,
    REASONING_TOKENS,
    TOOL_TOKENS,
    Thinking,
    choose,
)
from conserve.settings import load
from deployments.prompting import parsers_of, prompting, shows_tools, thinking

TALK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN3 = (
    "{% if tools %}# Tools{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '<tool_call>{"name": 1, "arguments": 2}</tool_call>{% endif %}'
    + TALK
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# Of Instruct-2507, as it was first published: it drops what others have reasoned.
INSTRUCT = (
    "{% for m in messages %}{% set content = m.content.split('</think>')[-1] %}"
    "<|im_start|>{{ m.role }}\n<think>{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, "on"),
        (TALK + "<think>\n{% endif %}", "on"),
        # GLM 4.7: what it must not think it is told has been thought.
        (TALK + "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}", "on"),
        # DeepSeek V3.1, and the smallest of Qwen 3.5.
        (TALK + "{{ '<think>' if thinking else '</think>' }}{% endif %}", "off"),
        (TALK + "{% if enable_thinking %}<think>\n{% endif %}{% endif %}", "off"),
        (TALK + "{% endif %}", "unsaid"),
        (INSTRUCT, "unsaid"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}<think>", "on"),
        ("{{ strftime_now('%Y') }}{{ messages[0].content }}<think>", "on"),
        # A template that takes parts of a message alone, and one that takes nothing.
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}<think>", "on"),
        ("{{ raise_exception('no') }}<think>", "unsaid"),
        ("{% if %}", "unsaid"),
    ],
)
def test_how_a_prompt_ends_says_whether_a_model_reasons(template: str, expected: Thinking) -> None:
    assert thinking(template) == expected


def test_what_every_request_is_told_counts() -> None:
    asked = TALK + "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    assert thinking(asked, {"enable_thinking": True}) == "on"
    # Its parser is told the same, so it can stay for those who ask.
    assert thinking(QWEN3, {"enable_thinking": False}) == "on"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, True),
        (TALK + "{% endif %}", False),
        # Phi 4's: tools are the system message's.
        ("{{ messages[0].tools }}{{ messages[0].content }}", False),
        (
            "{% if messages[0].role == 'system' and tools %}{{ tools }}{% endif %}"
            "{{ messages[-1].content }}",
            True,
        ),
        ("{{ raise_exception('alternate') }}{% for tool in tools %}{% endfor %}", True),
        ("{{ raise_exception('alternate') }}", False),
    ],
)
def test_a_template_that_shows_no_tools_is_found_out(template: str, expected: bool) -> None:
    assert shows_tools(template) is expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    return tmp_path


def _found(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    known = prompting(load({"model": str(folder), **arguments}))
    return choose(known).tool, choose(known).reasoning


def test_templates_are_found_where_vllm_finds_them(folder: Path) -> None:
    def write(name: str, value: Any) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))

    write("chat_template.json", {"chat_template": QWEN3.replace("<tool_call>", "[TOOL_CALLS]")})
    assert _found(folder) == ("mistral", "qwen3")
    named = [
        {"name": "default", "template": TALK + "<think>\n{% endif %}"},
        {"name": "tool_use", "template": "{{ messages[0].content }}{{ tools }}<minimax:tool_call>"},
    ]
    write("tokenizer_config.json", {"chat_template": named})
    assert _found(folder) == ("minimax_m2", "minimax_m2")
    write("tokenizer_config.json", {"chat_template": QWEN3})
    assert _found(folder) == ("hermes", "qwen3")
    write("chat_template.jinja", QWEN3.replace("<tool_call>", "<longcat_tool_call>"))
    assert _found(folder) == ("longcat", "qwen3")
    write(
        "additional_chat_templates/tool_use.jinja",
        "{{ messages[0].content }}{{ tools }}<minimax:tool_call>",
    )
    assert _found(folder) == ("minimax_m2", "minimax_m2")
    write("own.jinja", "{{ messages[0].content }}{{ tools }}<dots_function_call>")
    own = {"engine.chat_template": str(folder / "own.jinja")}
    assert _found(folder, **own) == ("dots", None)
    inline = {"engine.chat_template": "{{ messages[0].content }}{{ tools }}[TOOL_CALLS]"}
    assert _found(folder, **inline) == ("mistral", None)
    assert _found(folder, **{"engine.chat_template": "tool_use"}) == ("minimax_m2", None)


def test_tokens_are_found_in_every_kind_of_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools }}[TOOL_CALLS]")
    # A vocabulary that is not to be had is no reason to refuse.
    assert _found(folder)[0] == "mistral"
    decoder = {"added_tokens_decoder": {"9": {"content": "<s>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert _found(folder)[0] == "hermes"
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"[TOOL_CALLS]": 5}}}))
    assert _found(folder)[0] == "mistral"
    (folder / "tokenizer.json").unlink()
    (folder / "tekken.json").write_text(json.dumps({"special_tokens": ["[TOOL_CALLS]"]}))
    assert _found(folder)[0] == "mistral"
    (folder / "tekken.json").unlink()
    decoder["added_tokens_decoder"]["10"] = {"content": "[TOOL_CALLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert _found(folder)[0] == "mistral"


def test_the_tokenizer_that_is_set_is_looked_at(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "chat_template.jinja").write_text(QWEN3)
    assert _found(folder) == ("hermes", None)
    assert _found(folder, **{"engine.tokenizer": str(other)}) == ("hermes", "qwen3")


@pytest.mark.parametrize("model", ["acme/none", "s3://bucket/model", "/no/such/folder"])
def test_a_model_that_is_not_to_be_had_is_a_warning(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    choice = parsers_of(load({"model": model}))
    assert choice.settings.engine == {}
    assert choice.problem is not None
    assert choice.problem.startswith("tools are refused: model: config.json of")


def test_files_that_are_none_are_passed_over(folder: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.json"):
        (folder / name).write_text("[")
    assert _found(folder) == ("hermes", None)


def test_the_embedded_model_would_be_found_as_well(tmp_path: Path) -> None:
    """By its own files, as any other."""
    write_checkpoint(tmp_path)
    assert _found(tmp_path) == ("hermes", None)


# --- against vLLM --------------------------------------------------------------------------------

# Those that nothing in a model's files tells from others, or whose models vLLM does not serve.
_NOT_CHOSEN = {
    "tools": {"glm45", "granite-20b-fc", "hf", "llama4_json", "qwen3_json", "qwen3_xml", "xlam"},
    "reasoning": {"glm45", "hf", "holo2", "minimax_m2_append_think"},
}
EVERY = [*FORMATS, *chain(*ARCHITECTURES.values())]
TOOL_PARSERS = {one.tool for one in EVERY if one.tool is not None}
REASONING_PARSERS = {
    name for one in EVERY for name in (one.reasoning, one.on_request) if name is not None
} | {"qwen3", "deepseek_r1"}


def _tokenizer(tokens: tuple[str, ...]) -> Any:
    vocabulary = {token: number for number, token in enumerate(("<unk>", *tokens))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


def test_the_table_has_vllms_parsers_and_leaves_out_no_new_one() -> None:
    assert set(ToolParserManager.list_registered()) == TOOL_PARSERS | _NOT_CHOSEN["tools"]
    assert not TOOL_PARSERS & _NOT_CHOSEN["tools"]
    registered = set(ReasoningParserManager.list_registered())
    assert registered == REASONING_PARSERS | _NOT_CHOSEN["reasoning"]
    assert not REASONING_PARSERS & _NOT_CHOSEN["reasoning"]


def _needs(kind: str, name: str) -> tuple[str, ...]:
    """Tokens without which a parser is not made, but for those with a suffix of the model's."""
    own = {"hy_v3": ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>",
                     "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
           "hy_v4": ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>",
                     "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")}  # fmt: skip
    if kind == "tools":
        return TOOL_TOKENS.get(name) or own.get(name, ())
    think = ("<think>", "</think>")
    # Olmo's writes its tags in plain text, in pieces that its own vocabulary has.
    more = {"hy_v3": think, "hy_v4": think, "olmo3": ("</", "think", ">", "Ġ</")}
    return REASONING_TOKENS.get(name) or more.get(name, ())


@pytest.mark.parametrize("kind", ["tools", "reasoning"])
def test_parsers_want_the_tokens_that_the_table_says(kind: str) -> None:
    """Each is made with these in its vocabulary, and fails without any one of them."""
    table = TOOL_TOKENS if kind == "tools" else REASONING_TOKENS
    names = TOOL_PARSERS if kind == "tools" else REASONING_PARSERS
    wrong = []
    for name in sorted(names - set(PACKAGES)):
        find = (
            ToolParserManager.get_tool_parser
            if kind == "tools"
            else ReasoningParserManager.get_reasoning_parser
        )
        parser: Any = find(name)

        def makes(tokens: tuple[str, ...], parser: Any = parser) -> bool:
            try:
                parser(_tokenizer(tokens))
            except Exception:
                return False
            return True

        needs = _needs(kind, name)
        if not makes(needs):
            wrong.append(f"{name} wants more than {needs}")
        wrong += [
            f"{name} does without {token}"
            for token in table.get(name, ())
            if makes(tuple(one for one in needs if one != token))
        ]
    assert not wrong


def _wide(written: str) -> str:
    """With DeepSeek's bars."""
    return written.replace("|", "\uff5c")


# What models write, by the parser that reads it.
_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n"
    "</tool_call>",
    "step3p5": "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n"
    "</tool_call>",
    "seed_oss": "<seed:tool_call><function=f><parameter=a>b</parameter></function>"
    "</seed:tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"a": "b"}}',
    "pythonic": "[f(a='b')]",
    "llama4_pythonic": "[f(a='b')]",
    "olmo3": "<function_calls>f(a='b')</function_calls>",
    "lfm2": "<|tool_call_start|>[f(a='b')]<|tool_call_end|>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]',
    "deepseek_v3": _wide(
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>f\n"
        '```json\n{"a": "b"}\n```<|tool▁call▁end|><|tool▁calls▁end|>'
    ),
    "deepseek_v31": _wide(
        '<|tool▁calls▁begin|><|tool▁call▁begin|>f<|tool▁sep|>{"a": "b"}<|tool▁call▁end|>'
        "<|tool▁calls▁end|>"
    ),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": "b"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">b</parameter></invoke>'
    "</minimax:tool_call>",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}]',
    "granite4": '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>',
    "hunyuan_a13b": '<tool_calls>[{"name": "f", "arguments": {"a": "b"}}]</tool_calls>',
    "jamba": '<tool_calls>[{"name": "f", "arguments": {"a": "b"}}]</tool_calls>',
    "gemma4": '<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>",
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"a": "b"}}]',
    "apertus": '<|tools_prefix|>[{"f": {"a": "b"}}]<|tools_suffix|>',
    "internlm": '<|action_start|><|plugin|>{"name": "f", "parameters": {"a": "b"}}<|action_end|>',
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {"a": "b"}}</longcat_tool_call>',
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
    "<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:"
    'plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": "b"}<|plamo:end_tool_arguments:plamo|>'
    "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>b"
    "</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "gigachat3": '<|function_call|>{"name": "f", "arguments": {"a": "b"}}',
}


@pytest.mark.parametrize("name", sorted(_CALLS))
def test_a_parser_reads_what_the_table_takes_it_for(name: str) -> None:
    """Calls with a format's marks, by vLLM's own parser."""
    written = _CALLS[name]
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
    request = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    )
    parser = ToolParserManager.get_tool_parser(name)(_tokenizer(_needs("tools", name)))
    found = parser.extract_tool_calls(written, request)
    (call,) = found.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": "b"})
    # And the table sends what is written so to this parser, or to one that reads the same.
    marked = [one.tool for one in FORMATS if all(mark in written for mark in one.marks)]
    assert name in marked or name in {one.tool for one in chain(*ARCHITECTURES.values())}
