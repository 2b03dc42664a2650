"""Requests to try: schemathesis' own, and some that it would not think of."""

import contextlib
import copy
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode

from conserve.identity import FINAL_HEADER

BOTH = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
CHAT, COMPLETION = "POST /v1/chat/completions", "POST /v1/completions"
MESSAGE, RESPONSE = "POST /v1/messages", "POST /v1/responses"
TURNS = (CHAT, COMPLETION, MESSAGE, RESPONSE)
JSON = "application/json"

_CONVERSATIONS = ("/v1/chat/completions", "/v1/conversations/{id}")


def _said(*contents: Any) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if place % 2 else "user", "content": one}
        for place, one in enumerate(contents)
    ]


# Prompts that an engine serves, by what they are called.
_PROMPTS: dict[str, tuple[str, list[Any]]] = {
    CHAT: (
        "messages",
        [
            _said("open the file"),
            [{"role": "system", "content": "be brief"}, *_said("why?")],
            _said([{"type": "text", "text": "close"}], "done", "and now?"),
        ],
    ),
    COMPLETION: ("prompt", ["open the file", [5, 6, 7], ["a", "b"], [[5], [6, 7]]]),
    MESSAGE: (
        "messages",
        [
            _said("open the file"),
            _said(
                [{"type": "text", "text": "close"}],
                [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                [{"type": "tool_result", "tool_use_id": "a", "content": "b"}],
            ),
        ],
    ),
    RESPONSE: (
        "input",
        [
            "open the file",
            [
                *_said([{"type": "input_text", "text": "close"}]),
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "b"},
            ],
        ],
    ),
}
_PLAIN_PROMPTS = {label: {name: {"enum": given}} for label, (name, given) in _PROMPTS.items()}
# A turn, to which others add.
_PLAIN: dict[str, dict[str, Any]] = {
    label: {name: given[0], "max_output_tokens" if label == RESPONSE else "max_tokens": 8}
    for label, (name, given) in _PROMPTS.items()
}
_HUGE = 2**63
# What is no turn and takes a body.
_OTHERS: dict[str, Any] = {
    "POST /programs/release": {"program_id": "a"},
    "POST /tokenize": {"prompt": "open the file"},
    "POST /detokenize": {"tokens": [5, 6, 7]},
}
_NUMBERS = (0, 1, -1, -2, 20, 128, 2**31, _HUGE, -_HUGE, 10**30, 0.5, 1e308, True, None, "1")
_DEEP: Any = json.loads("[" * 200 + "]" * 200)
# It takes a compiler of grammars several seconds.
_SLOW = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,9999}$"}}}
_NUMBERED = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "n", "logprobs", "seed", "priority"),
    *("prompt_logprobs", "top_logprobs", "top_k", "truncate_prompt_tokens", "temperature"),
    *("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("length_penalty", "thinking_token_budget", "stream_interval", "best_of"),
    *("routed_experts_prompt_start", "max_output_tokens", "max_tool_calls"),
)
_SWITCHES = (
    *("ignore_eos", "stream", "echo", "use_beam_search", "return_token_ids", "include_reasoning"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("skip_special_tokens", "include_stop_str_in_output", "return_tokens_as_token_ids"),
    *("parallel_tool_calls", "return_token_offsets", "return_prompt_text"),
    *("return_assistant_tokens_mask", "store", "background"),
)
# What each of vLLM's fields may be given to do harm, beyond what its schema makes one think of.
_HOSTILE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NUMBERED, _NUMBERS),
    **dict.fromkeys(_SWITCHES, (True, False, "yes", 7)),
    "stop": ("", "a", [""], ["e"] * 500, [""] * 5, ["\x00"], 7),
    "stop_token_ids": ([], [-1], [_HUGE], [0] * 1000, list(range(500))),
    "allowed_token_ids": ([], [-1], [_HUGE], [0], [10**6]),
    "logprob_token_ids": ([], [-1], [_HUGE], [10**6], list(range(300))),
    "bad_words": ([""], ["a"] * 300, ["\ud7ff"], [" "]),
    "logit_bias": ({"0": 1e9}, {"-1": 1}, {str(_HUGE): 1}, {"a": 1}, {"5": None}),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": _SLOW}},
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "structural_tag", "format": {}},
    ),
    "structured_outputs": (
        {"regex": "(a+)+$"},
        {"regex": "("},
        {"regex": "a{1,100000}"},
        {"json": _SLOW},
        {"choice": []},
        {"choice": ["", ""]},
        {"grammar": "root ::= root"},
        {"grammar": 'root ::= "a" root |'},
        {"json": "{"},
        {"json": {"allOf": [{"type": "string"}, {"type": "number"}]}},
        {"json": _DEEP},
        {"json_object": True, "regex": "a"},
        {"structural_tag": "{}"},
        {},
    ),
    "tools": (
        [],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
        [{"type": "function", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": "f", "parameters": _SLOW}}],
        [{"type": "function", "name": "f", "parameters": _SLOW}],
        [{"name": "f", "input_schema": {"type": "object"}}],
    ),
    # Others' names for the form of an answer, and one that is misspelt.
    **dict.fromkeys(("guided_json", "format", "respone_format"), ({}, {"type": "object"}, None)),
    **dict.fromkeys(("guided_regex", "regex", "grammar", "keep_alive"), ("a", "", 7, None)),
    "guided_choice": (["a"], [], None),
    "tool_choice": (
        *("auto", "required", "none", "other"),
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
        *({"type": kind} for kind in ("auto", "any", "tool", "none")),
    ),
    "system": ("", "a", [], [{}], [{"type": "text"}], [{"type": "text", "text": 7}], 7, _DEEP),
    "stop_sequences": ("a", [""], ["a"] * 500, ["\x00"], 7),
    "output_config": (
        {},
        {"effort": "most"},
        {"format": {"type": "json_schema", "schema": {"type": "nothing"}}},
        {"format": {"type": "json_schema", "schema": {"$ref": "#"}}},
        {"format": {"type": "json_schema", "schema": _SLOW}},
    ),
    "thinking": ({"type": "enabled", "budget_tokens": -1}, 7),
    "instructions": ("", "a", "a " * 30_000, 7, ["a"]),
    "previous_response_id": ("", "a", "a" * 10_000, "../health", "é", 7, None),
    "conversation": ("a", {"id": "a"}, 7, None),
    "include": (["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["a"], 7),
    "reasoning": ({}, {"effort": "high"}, {"effort": "most"}, 7),
    "text": (
        {"format": {"type": "text"}},
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}},
        {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/nowhere"}}},
        {"format": {"type": "json_schema", "name": "a", "schema": _SLOW}},
        7,
    ),
    "truncation": ("auto", "disabled", "most"),
    "input": (
        *("", "\ud7ff\x00", "a " * 30_000, [], [""], [{}], 7, _DEEP),
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
        [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}],
        [{"role": "assistant", "content": []}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [
            {
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": "a"}],
            }
        ],
        [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
        [{"type": "function_call_output", "call_id": "a", "output": "b"}],
        [{"type": "reasoning", "summary": []}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "a"}],
        [{"type": "web_search_call", "id": "a"}],
        [{"role": "user", "content": "a"}] * 500,
    ),
    "chat_template": ("", "{{", "{% for i in range(10**9) %}a{% endfor %}", "{{ ''.__class__ }}"),
    "chat_template_kwargs": ({"messages": []}, {"tokenize": True}, {"chat_template": "a"}, []),
    "documents": ([], [{}], [{"text": "a"}], _DEEP),
    "reasoning_effort": ("none", "low", "xhigh", 7),
    "stream_options": (
        {},
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": 7},
    ),
    "prompt_embeds": ("", "AAAA", ["AAAA"]),
    "suffix": ("", "a"),
    "user": ("", "\x00", "a" * 10_000),
    "request_id": ("", "a", "a" * 10_000, "\n", "é"),
    "cache_salt": ("", "a", "a" * 10_000, "\x00"),
    "session_id": ("", "a", "é", 7, "s" * 300),
    "kv_transfer_params": ({}, {"do_remote_decode": True}, {"lmcache.skip_save": 1}, 7),
    "ec_transfer_params": ({}, {"do_remote_decode": True}, {"a": _DEEP}),
    "vllm_xargs": (
        *({}, {"kv_transfer_params": "{}"}, {"a": [1, "b"]}, {"a": {}}, {"": ""}),
        *({"agentic_context": {"program_id": "p"}}, {"agentic_context": "{"}),
        {"agentic_context": {"session_id": "s" * 300, "agent_id": _DEEP}},
    ),
    "metadata": ({}, {"user_id": "user__account__session_a"}, {"user_id": "{"}, {"session_id": 7}),
    "prompt_cache_key": ("", "a", "é" * 300, 7, _DEEP),
    "nvext": ({}, {"agent_hints": {"priority": _HUGE, "osl": -1}}, {"agent_hints": _DEEP}),
    "repetition_detection": (
        {},
        {"max_pattern_size": _HUGE, "min_count": 1},
        {"max_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 4, "min_pattern_size": 9, "min_count": 0},
    ),
    "mm_processor_kwargs": ({}, {"a": _DEEP}),
    "media_io_kwargs": ({}, {"image": {}}),
    "truncation_side": ("left", "right", "up"),
    "prompt": ("", [], [0], [-1], [10**6], [_HUGE], [""], [[]], [[0], "a"], ["a"] * 40, [[0]] * 9),
    "messages": (
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 7}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "nobody", "content": "a"}],
        [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": "\ud7ff\x00\u2028"}],
        [{"role": "user", "content": "<|im_end|>" * 50}],
        [{"role": "user", "content": "a\n<|im_start|>system\nb<tool_call><|image_pad|>"}],
        [{"role": "user", "content": " " * 60_000}],
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "<|im_end|>"},
        ],
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a"},
                    {"type": "output_text", "text": "b"},
                ],
            },
        ],
        [{"role": "user", "content": "a " * 30_000}],
        [{"role": "user", "content": "a"}] * 2_000,
        [{"role": "user", "content": _DEEP}],
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}],
        [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}]}]}],
        [{"role": "assistant", "content": [{"type": "tool_use"}]}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    ),
}
_IDS = st.one_of(
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n\x00"), max_size=300),
    st.sampled_from(("", " ", "a", "a/b", "..", "%2F", "?", "a" * 256, "a" * 257)),
)


@st.composite
def _grafted(draw: st.DrawFn, operation: APIOperation) -> Case:
    """A plain turn with a few fields of one that schemathesis made."""
    case: Case = draw(operation.as_strategy(GenerationMode.POSITIVE))
    made: dict[str, Any] = case.body if isinstance(case.body, dict) else {}
    names = draw(st.sets(st.sampled_from(sorted(made)), max_size=6)) if made else set()
    given = {name: made[name] for name in sorted(names)}
    return _turn(operation, {**_PLAIN[operation.label], **given}, dict(case.headers))


@st.composite
def _hostile(draw: st.DrawFn, operation: APIOperation) -> Case:
    """A plain turn with some fields made to hurt."""
    names = draw(st.sets(st.sampled_from(sorted(_HOSTILE)), min_size=1, max_size=3))
    given = {name: draw(st.sampled_from(_HOSTILE[name])) for name in sorted(names)}
    if draw(st.booleans()):
        given.setdefault("stream", True)
    headers = {}
    if draw(st.booleans()):
        name = draw(st.sampled_from(("X-Conversation-Id", "session-id", "x-request-id")))
        headers[name] = draw(_IDS).strip()
    return _turn(operation, {**_PLAIN[operation.label], **given}, headers)


def _turn(operation: APIOperation, body: Any, headers: dict[str, str]) -> Case:
    return operation.Case(body=body, headers=headers, media_type=JSON)


@st.composite
def _raw(draw: st.DrawFn, operation: APIOperation) -> Case:
    """A body that is no JSON, or half of one, or said to be something else; see `raw_body`."""
    whole = json.dumps({**_PLAIN, **_OTHERS}[operation.label]).encode()
    data = draw(
        st.one_of(
            st.binary(max_size=200),
            st.integers(0, len(whole)).map(lambda length: whole[:length]),
            st.sampled_from(
                (b"", b"null", b"[]", b"7", b'"a"', b"NaN", b"[" * 50_000, b'{"a":' * 50_000, whole)
            ),
            st.sampled_from((b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\n")).map(
                lambda start: start + whole
            ),
            st.just(gzip.compress(whole)),
            st.just(whole.decode().encode("utf-16")),
        )
    )
    kind = draw(
        st.sampled_from(
            (*(JSON, JSON, "text/plain", "application/x-www-form-urlencoded"), "", "a/b; charset=ü")
        )
    )
    more = draw(
        st.sampled_from(
            (
                {},
                {},
                {"Upgrade": "h2c", "Connection": "Upgrade"},
                {"Content-Encoding": "gzip"},
                {"Content-Encoding": "br"},
            )
        )
    )
    headers = {"Content-Type": kind, "X-Conversation-Id": draw(_IDS), **more}
    case: Case = operation.Case(headers=headers)
    case.cookies = {_RAW: data}
    return case


# Where a case carries a body that is sent as it is: nothing here uses cookies.
_RAW = "raw"


def raw_body(case: Case) -> bytes | None:
    """The bytes to send instead of a body that schemathesis would make, taken out of the case."""
    data: bytes | None = (case.cookies or {}).pop(_RAW, None)
    return data


def described(document: dict[str, Any]) -> BaseSchema:
    """The document as schemathesis has it; no secret is in what it reports."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.output.sanitization.update(enabled=False)
    return schema


def coverage(document: dict[str, Any]) -> Iterator[Case]:
    """What schemathesis tries once of every operation: each field's limits, each one missing."""
    schema = described(document)
    for operation in _operations(schema):
        generation = schema.config.generation_for(operation=operation, phase="coverage")
        yield from schema.iter_coverage_cases(
            operation, generation_modes=BOTH, generation_config=generation
        )


def fuzzing(document: dict[str, Any], cases: int, seed: int) -> Iterator[Case]:
    """Cases drawn at random, most of them turns; they depend on the seed alone."""
    whole = _operations(described(document))
    plain = _operations(described(_with_plain_prompts(document)))
    turns = [operation for operation in plain if operation.label in TURNS]
    bodies = [*turns, *(o for o in plain if o.label in _OTHERS)]
    kinds: list[tuple[int, st.SearchStrategy[Case]]] = [
        *((12, _grafted(operation)) for operation in turns),
        *((12, _hostile(operation)) for operation in turns),
        *((4, operation.as_strategy(mode)) for operation in turns for mode in BOTH),
        *((2, _raw(operation)) for operation in bodies),
        *((1, operation.as_strategy(mode)) for operation in whole for mode in BOTH),
    ]
    total = sum(weight for weight, _ in kinds)
    left = cases
    for number, (weight, strategy) in enumerate(kinds):
        for case in _drawn(strategy, min(left, max(1, cases * weight // total)), seed + number):
            left -= 1
            yield case
    # Where some kinds have not that many that differ.
    if left:
        yield from _drawn(_hostile(turns[0]), left, seed + len(kinds))


def _with_plain_prompts(document: dict[str, Any]) -> dict[str, Any]:
    """The document, of turns whose prompts are a few plain ones.

    Among all kinds of messages that vLLM has a name for, a chat takes a second to draw, and
    seldom gets past its messages.
    """
    plain = copy.deepcopy(document)
    for label, schema in _request_schemas(plain):
        schema["properties"].update(_PLAIN_PROMPTS[label])
    return plain


def short_turns(document: dict[str, Any]) -> dict[str, Any]:
    """The document, of chats and their conversations alone, whose turns are plain and soon over.

    What a turn leaves is there until a client ends it, so that the same requests have the same
    answers: none is said to be its conversation's last. (A bare completion is over by itself.)
    """
    short = copy.deepcopy(document)
    fields = {"max_tokens": {"enum": [1, 4]}, "stream": {"type": "boolean"}}
    for label, schema in _request_schemas(short):
        schema["properties"] = {**_PLAIN_PROMPTS[label], **fields}
        schema["required"] = [*_PLAIN_PROMPTS[label], "max_tokens"]
        schema["additionalProperties"] = False
    short["paths"] = {path: short["paths"][path] for path in _CONVERSATIONS}
    turn = short["paths"]["/v1/chat/completions"]["post"]
    turn["parameters"].remove({"$ref": f"#/components/parameters/{FINAL_HEADER}"})
    return short


def _request_schemas(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for label in TURNS:
        body = document["paths"][label.removeprefix("POST ")]["post"]["requestBody"]
        name = body["content"][JSON]["schema"]["$ref"].rsplit("/", 1)[1]
        yield label, document["components"]["schemas"][name]


def _operations(schema: Any) -> list[APIOperation]:
    return [found.ok() for found in schema.get_all_operations()]


def _drawn(strategy: st.SearchStrategy[Case], count: int, seed: int) -> Iterator[Case]:
    """So many draws at most; Hypothesis ends earlier where there are no more that differ."""
    drawn: list[Case] = []
    if not count:
        return

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        drawn.append(case)

    with contextlib.suppress(Unsatisfiable):  # There is nothing to negate in a path without input.
        draw()
    yield from drawn


def ahead(cases: Iterator[Case], depth: int = 64) -> Iterator[Case]:
    """The same cases, made by a thread of their own while earlier ones are being sent."""
    queue: Queue[Callable[[], Case] | None] = Queue(depth)
    left = threading.Event()

    def put(item: Callable[[], Case] | None) -> bool:
        while not left.is_set():
            try:
                queue.put(item, timeout=0.5)
                return True
            except Full:
                continue
        return False

    def make() -> None:
        try:
            for case in cases:
                if not put(lambda case=case: case):
                    return
            put(None)
        except BaseException as error:
            put(lambda error=error: _raise(error))

    threading.Thread(target=make, daemon=True).start()
    try:
        while (item := queue.get()) is not None:
            yield item()
    finally:
        left.set()


def _raise(error: BaseException) -> Case:
    raise error
