"""Bounds what one request may hold, and so what it costs all others.

The threads that parse, hash and pass on a request also pass on all tokens, here and in the engine.
The limits bound each step to about 25 ms, measured with vLLM's own protocol classes on two slow
cores (3 us a message, 10 us a part or a tool call).
"""

import json
from collections.abc import Mapping
from typing import Any

from conserve import apis, items
from conserve.errors import ApiError, unfit
from conserve.items import ITEMS_A_PART

# Entries of lists and objects in all, at whatever depth, token ids aside.
MOST_VALUES = 65_536
# Of these, lists and objects, which cost several times as much as numbers.
MOST_CONTAINERS = 16_384
# Lists and objects within each other; the body is the first.
DEEPEST = 64
# Messages, parts of their contents and tool calls, together: each is checked against a dozen types,
# and a part or a call counts as three messages. Twelve hundred turns fit, with a call each.
MOST_ITEMS = 6144
# Prompts of a completion, times the choices asked for: each is a request to the engine.
MOST_CHOICES = 128
# Token ids of a completion's prompts, together.
MOST_TOKEN_IDS = 131_072
# Text to tokenize, with the JSON around it: some 130,000 tokens, as in a prompt.
MOST_TOKENIZE_BYTES = 512 * 1024
# The same if each token's text is wanted, which takes several times as long.
MOST_TOKEN_STRS_BYTES = 64 * 1024
# Token ids to detokenize: as many as in a prompt, each with at most 15 digits and spaces.
MOST_DETOKENIZE_BYTES = 2 * 1024 * 1024
# Engines compile grammars of these, within bounds of their own (`deployments.engine.grammars`).
_GRAMMARS = ("response_format", "structured_outputs", "output_config", "text")
MOST_GRAMMAR_CHARS = 32 * 1024
# The same for tools if one must be called.
MOST_TOOL_CHARS = 64 * 1024
# Counted at a time, while other threads wait.
_PIECE_BYTES = 64 * 1024
_LARGEST_TOKEN_ID = 2**31 - 1
# vLLM 0.32 accepts larger whole numbers in many parameters, and then cannot send them to its core.
_LEAST_NUMBER, _MOST_NUMBER = -(2**63), 2**63 - 1
# These become the prompt, or are compiled: their numbers are text then.
_AS_TEXT = {
    *("messages", "prompt", "tools", "functions", "documents", "chat_template_kwargs"),
    *("response_format", "structured_outputs", "system", "input", "output_config", "text"),
}
# A constant, since `dict | list` would be evaluated for every value.
_CONTAINER = (dict, list)
# The engine looks at each of these in one go, or at each output token.
_MOST_ENTRIES = {
    "tools": 512,
    "functions": 512,
    "stop": 64,
    "stop_sequences": 64,
    "include": 16,
    "stop_token_ids": 1024,
    "bad_words": 128,
    "logit_bias": 1024,
    "vllm_xargs": 128,
}
_LONGEST_CHARS = {"stop": 1024, "stop_sequences": 1024, "bad_words": 256}


def check_raw(raw: bytes, chat: bool) -> None:
    """Refuse a body that holds too much, before it is parsed, with ApiError (400).

    Parsing 8 MiB of ``[],`` takes 0.3 s or more and 0.4 GB at once; counting takes milliseconds, in
    pieces. Anything but JSON passes.
    """
    most = MOST_VALUES if chat else MOST_VALUES + MOST_TOKEN_IDS
    if raw.count(b",") <= most and raw.count(b"[") + raw.count(b"{") <= MOST_CONTAINERS:
        return
    separators = containers = at = 0
    in_string = False
    while at < len(raw):
        piece = raw[at : at + _PIECE_BYTES]
        # Keep a backslash with the character that it escapes.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = raw[at : at + len(piece) + 1]
        at += len(piece)
        between = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(between[in_string::2])
        in_string ^= len(between) % 2 == 0
        separators += outside.count(b",")
        containers += outside.count(b"[") + outside.count(b"{")
        if separators > most or containers > MOST_CONTAINERS:
            raise ApiError(
                400,
                f"a request may hold {MOST_VALUES} values in all, {MOST_CONTAINERS} of them lists "
                f"and objects, and {MOST_TOKEN_IDS} token ids in its prompt, and this one holds "
                "more; send fewer messages, or text instead of structure",
            )


def check(body: Mapping[str, Any], path: str) -> None:
    """Refuse a request that is too large in some respect, or not valid, with ApiError (400)."""
    prompts = 1
    if path == apis.COMPLETIONS:
        prompts = _check_prompt(body.get("prompt"))
        body = {name: value for name, value in body.items() if name != "prompt"}
    has_messages = path not in (apis.COMPLETIONS, apis.RESPONSES)
    _check_values(body, has_messages)
    if path == apis.RESPONSES:
        _check_count(items.response_items(body), items.MOST_RESPONSE_ITEMS, "input", "items")
        items.check_response_tools(body)
    elif apis.is_anthropic(path):
        _check_count(items.message_items(body), MOST_ITEMS, "messages", "messages")
    for name, most in _MOST_ENTRIES.items():
        _check_entries(name, body.get(name), most)
    if not isinstance(body.get("structured_outputs"), dict | None):
        # vLLM 0.32 reads it before it checks its type, and fails.
        raise unfit("structured_outputs", "must be an object")
    for name in _GRAMMARS:
        length = len(json.dumps(body.get(name), ensure_ascii=False))
        if length > MOST_GRAMMAR_CHARS:
            raise unfit(
                name,
                f"may have {MOST_GRAMMAR_CHARS} characters of JSON, and this one has {length}; ask "
                "for something simpler",
            )
    _check_tool_grammars(body)
    # None is asked for log-probabilities of the prompt, and to fill the cache.
    may_be_none = body.get("echo") if path == apis.COMPLETIONS else apis.is_anthropic(path)
    for name in apis.OUTPUT_CAPS:
        cap = body.get(name)
        # vLLM names one field for all of them.
        if isinstance(cap, int) and cap < (0 if may_be_none else 1):
            raise unfit(name, f"must be at least 1, and is {cap}")
    if not isinstance(body.get("stream"), bool | None):
        raise unfit("stream", "must be true or false")
    n = body.get("n")
    # The engine would accept "2", and "yes" above.
    if n is not None and (type(n) not in (int, float) or n % 1):
        raise unfit("n", "must be an integer")
    if n is not None and n * prompts > MOST_CHOICES:
        raise _refused(
            f"a request may ask for {MOST_CHOICES} choices in all, and this one asks for "
            f"{min(n, 10**9)} of {prompts} prompt{'s' * (prompts > 1)}; send several",
            "n",
        )


def check_tokenize(body: Mapping[str, Any], length: int) -> None:
    """Refuse to tokenize JSON of ``length`` bytes that is too large, with ApiError (400)."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if prompt is None and messages is None:
        raise _refused("send a prompt, which is a string, or messages", "prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise unfit("prompt", "must be a string; send one at a time")
    _check_values(body, messages is not None)
    _check_entries("tools", body.get("tools"), _MOST_ENTRIES["tools"])
    # The engine would accept "yes" and 1 as true.
    if body.get("return_token_strs", False) not in (None, False) and length > MOST_TOKEN_STRS_BYTES:
        raise _refused(
            f"with return_token_strs a request may have {MOST_TOKEN_STRS_BYTES} bytes, and this "
            f"one has {length}; send the text in parts, or ask for the tokens alone",
            "return_token_strs",
        )


def check_detokenize(body: Mapping[str, Any]) -> None:
    """Refuse to detokenize what is no list of token ids, or too many, with ApiError (400)."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise unfit("tokens", "must be a list of token ids")
    _check_values({name: value for name, value in body.items() if name != "tokens"})
    _check_id_count(len(tokens), "tokens")
    _check_ids(tokens, "tokens")


def _check_tool_grammars(body: Mapping[str, Any]) -> None:
    """Bound the tools of which one must be called: the engine makes a grammar of them."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = choice.get("mode")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "none"):
        return  # Anthropic's words for it.
    if choice in (None, "auto", "none") or not isinstance(tools, list):
        return
    length = len(json.dumps(tools, ensure_ascii=False))
    if length > MOST_TOOL_CHARS:
        raise _refused(
            f"tools of which tool_choice has one called may have {MOST_TOOL_CHARS} characters of "
            f"JSON, and these have {length}; send fewer, or leave the choice to the model",
            "tools",
        )


def _check_values(body: Mapping[str, Any], has_messages: bool = False) -> None:
    """Bound how many values a request holds, how deep, and its numbers.

    Args:
        has_messages: whether its messages have to be a chat's, and are looked at as such.
    """
    if has_messages and "messages" not in body:
        raise _no_messages()
    left = MOST_VALUES - len(body)
    for name, value in body.items():
        level, depth = [value], 1
        if has_messages and name == "messages":
            entries, level = _in_messages(value)
            left, depth = left - entries, 3
        while True:
            if left < 0:
                raise _refused(
                    f"a request may hold {MOST_VALUES} values in all, and this one exceeds that "
                    f"in {name[:64]}; send fewer messages, or text instead of structure",
                    name[:64],
                )
            whole = [one for one in level if isinstance(one, int)]
            fits = all(_LEAST_NUMBER <= one <= _MOST_NUMBER for one in whole)
            if name not in _AS_TEXT and not fits:
                raise unfit(name, "has a number that takes more than 64 bits; send a smaller one")
            level = [one for one in level if isinstance(one, _CONTAINER)]
            if not level:
                break
            depth += 1
            if depth > DEEPEST:
                raise _refused(
                    f"a request may be nested {DEEPEST} deep, and {name[:64]} goes deeper; "
                    "flatten it",
                    name[:64],
                )
            left -= sum(map(len, level))
            level = [
                inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
            ]


def _in_messages(messages: Any) -> tuple[int, list[Any]]:
    """Judge a chat's messages; return how many values they have, and the containers among these."""
    if not isinstance(messages, list) or not messages:
        raise _no_messages()
    items = entries = len(messages)
    within: list[Any] = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refused(f"messages[{position}] must be an object with a role")
        content = message.get("content")
        none = content is None and message["role"] != "user"
        if not none and not isinstance(content, str | list):
            raise _refused(f"messages[{position}].content must be a string or a list of parts")
        if isinstance(content, list):
            items += ITEMS_A_PART * len(content)
            # vLLM takes ten times as long to refuse others.
            if not all(isinstance(part, str | dict) for part in content):
                raise _refused(f"messages[{position}].content may hold objects and strings only")
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None):
            raise _refused(f"messages[{position}].tool_calls must be a list")
        items += ITEMS_A_PART * len(calls or ())
        entries += len(message)
        within += [value for value in message.values() if isinstance(value, _CONTAINER)]
    if items > MOST_ITEMS:
        raise _refused(
            f"a chat may have {MOST_ITEMS} messages, of which each part of a content and each tool "
            f"call counts as {ITEMS_A_PART}, and this one has {items}; join or drop some",
            "messages",
        )
    return entries, within


def _no_messages() -> ApiError:
    return _refused("messages must be a list with at least one message")


def _refused(what: str, name: str = "messages") -> ApiError:
    return ApiError(400, what, param=name)


def _check_count(count: int, most: int, name: str, what: str) -> None:
    if count > most:
        raise unfit(
            name,
            f"may have {most} {what}, of which each counts by what it costs to read (a part of one "
            f"as {ITEMS_A_PART}), and these count {count}; join or drop some",
        )


def _check_entries(name: str, value: Any, most: int) -> None:
    if not isinstance(value, list | dict | str):
        return
    entries = [value] if isinstance(value, str) else value
    if len(entries) > most:
        raise unfit(name, f"may have {most} entries, not {len(entries)}")
    longest = _LONGEST_CHARS.get(name)
    if longest is not None and any(isinstance(one, str) and len(one) > longest for one in entries):
        raise _refused(f"an entry of {name} may have {longest} characters, not more", name)


def _check_prompt(prompt: Any) -> int:
    """Check a completion's prompt, and return how many prompts it holds."""
    if not prompt:
        raise unfit("prompt", "must not be empty")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list):
        raise unfit("prompt", "must be a string or a list")
    single = isinstance(prompt[0], int)
    lists = [prompt] if single else [one for one in prompt if isinstance(one, list)]
    _check_id_count(sum(map(len, lists)), "prompt")
    if single or len(lists) == len(prompt):
        for one in lists:
            _check_ids(one, "prompt")
    elif not all(isinstance(one, str) for one in prompt):
        raise unfit("prompt", "must hold strings, or token ids, or lists of token ids")
    if single:
        return 1
    if len(prompt) > MOST_CHOICES:
        raise _refused(
            f"a completion may have {MOST_CHOICES} prompts, and this one has {len(prompt)}; send "
            "several",
            "prompt",
        )
    return len(prompt)


def _check_id_count(ids: int, name: str) -> None:
    if ids > MOST_TOKEN_IDS:
        raise unfit(
            name,
            f"may hold {MOST_TOKEN_IDS} token ids, and this one holds {ids}; send text, or several "
            "requests",
        )


def _check_ids(ids: list[Any], name: str) -> None:
    # A bool is an int to Python, and no token.
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_TOKEN_ID):
        raise _refused(f"token ids in {name} must be integers from 0 to {_LARGEST_TOKEN_ID}", name)
