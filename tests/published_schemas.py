"""Values that the published schemas of chat completions, Messages and Responses allow.

The ``openai`` and ``anthropic`` packages state what a request may hold as ``TypedDict``s, which are
generated from the schemas that both companies publish. `Published` makes a value for each place
where they leave a choice: an optional field that is given, a null, each word of an enumeration,
each branch of a union. `cases` makes requests of those, for each role's message, each part of its
content and each tool.
"""

import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
)

import pydantic
import typing_extensions
from anthropic.types import message_create_params
from anthropic.types.message_param import MessageParam
from openai.types.chat import completion_create_params
from openai.types.chat.chat_completion_message_param import ChatCompletionMessageParam

from conserve.apis import CHAT, MESSAGES
from conserve.settings import Settings

Json = dict[str, Any]

# Texts that can be told from anything else in a prompt.
WORD = "aubergine"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


class Case(NamedTuple):
    """A request, and the choice that it makes.

    Attributes:
        where: the place within a message, or a field of the request.
        choice: what stands there.
    """

    path: str
    where: str
    choice: str
    body: Json

    @property
    def told(self) -> bool:
        """Whether there is text in its messages that the model is to read (`WORD`)."""
        return WORD in str(self.body.get("messages"))

    def names(self, message: str) -> bool:
        """Whether a refusal names a field that is in the request, or the kind of an object."""
        return any(name in message for name in _names(self.body) - {"messages", "role", "content"})

    def __str__(self) -> str:
        return f"{self.path} {self.where} = {self.choice}"


def _names(value: Any) -> set[str]:
    """Names of fields and kinds of objects, at whatever depth."""
    if isinstance(value, list):
        return {name for one in value for name in _names(one)}
    if not isinstance(value, dict):
        return set()
    kinds = {value["type"]} if isinstance(value.get("type"), str) else set()
    return {*value, *kinds} | {name for one in value.values() for name in _names(one)}


# What a schema cannot say of a field: which values mean something to a server of one model.
_VALUES: dict[str, list[Any]] = {
    "model": [Settings().model_id],
    "max_tokens": [2],
    "max_completion_tokens": [2],
    "logit_bias": [None, {"5": 1}],
    "url": [PIXEL],
    "data": ["iVBORw0KGgo="],
    "parameters": [SCHEMA],
    "input_schema": [SCHEMA],
    "schema": [SCHEMA],
    "arguments": ['{"on": true}'],
    "input": [{"on": True}],
    "budget_tokens": [1024],
    "top_p": [None, 0.5],
    "frequency_penalty": [None, 0.5],
    "allowed_tools": [
        {"mode": mode, "tools": [{"type": "function", "function": {"name": "look_up"}}]}
        for mode in ("auto", "required")
    ],
    "stop": [None, "\n\n\n", ["\n\n\n"]],
    "stop_sequences": [["\n\n\n"]],
}
# Of kinds of objects that are not among these, one with what it needs is enough: they are refused.
_WITH_CHOICES = (
    *("text", "image", "image_url", "input_audio", "thinking", "redacted_thinking", "refusal"),
    *("tool_use", "tool_result", "tool_reference", "function", "allowed_tools", "ephemeral"),
    *("auto", "any", "tool", "none", "enabled", "disabled", "adaptive", "between_tools"),
    *("base64", "url", "json_schema", "json_object"),
)
_TEXTS = {
    # The model is to read these.
    **dict.fromkeys(("text", "content", "refusal", "title", "context"), WORD),
    "name": "look_up",
    **dict.fromkeys(("id", "tool_call_id", "tool_use_id"), "call_1"),
}


class Variant(NamedTuple):
    """A value that makes one choice.

    Attributes:
        where: the place within the value at which it departs from the plainest one.
        choice: what stands there.
        null: whether that is a null in a field that may be left out.
    """

    where: str
    choice: str
    value: Any
    null: bool = False

    @property
    def place(self) -> str:
        return f"{self.where}={self.choice}"


class Published:
    """Makes values of types.

    Args:
        needed: fields that a schema allows to be left out, and that plain values have all the same,
            by the names of their types.
        values: the values to take for fields of these names.
        texts: a text for fields of these names.
        expanded: kinds of objects that are gone into; None: all. Of others, the plainest is enough.
        nulls: whether to make nulls of fields that may be left out, and empty lists.
    """

    def __init__(
        self,
        needed: Mapping[str, set[str]] | None = None,
        values: Mapping[str, list[Any]] | None = None,
        texts: Mapping[str, str] | None = None,
        expanded: Collection[str] | None = None,
        *,
        nulls: bool = False,
    ) -> None:
        self._needed = needed or {}
        self._values = values or {}
        self._texts = texts or {}
        self._expanded = expanded
        self._nulls = nulls

    def variants(self, kind: Any, name: str = "", seen: tuple[Any, ...] = ()) -> Iterator[Variant]:
        """Yield values of a type, the plainest first.

        Args:
            name: of the field that they are for.
            seen: types that it stands within, which are not gone into again.
        """
        origin, arguments = get_origin(kind), get_args(kind)
        if name in self._values:
            for value in self._values[name]:
                yield Variant("", repr(value), value)
        elif origin in (Required, NotRequired, Annotated):
            yield from self.variants(arguments[0], name, seen)
        elif origin in (Union, types.UnionType):
            # A null says less than any value; the plainest is a value.
            for one in sorted(arguments, key=lambda one: one is type(None)):
                where = f"<{one.__name__}>" if typing_extensions.is_typeddict(one) else ""
                for variant in self.variants(one, name, seen):
                    yield variant._replace(where=where + variant.where)
        elif origin is Literal:
            for value in arguments:
                yield Variant("", str(value), value)
        elif kind is type(None):
            yield Variant("", "null", None)
        elif kind is bool:
            for value in (True, False):
                yield Variant("", str(value), value)
        elif kind is int or kind is float:
            yield Variant("", "1", kind(1))
        elif kind is object:
            yield Variant("", "an object", {"a": 1})
        elif kind is str:
            yield Variant("", "a string", self._texts.get(name, "word"))
        elif typing_extensions.is_typeddict(kind) or _is_model(kind):
            yield from self._objects(kind, seen)
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            yield Variant("", "an object", {})
        elif isinstance(origin, type) and issubclass(origin, Iterable):
            for variant in self.variants(arguments[0], name, seen):
                yield variant._replace(where=f"[0]{variant.where}", value=[variant.value])
            if self._nulls:
                yield Variant("", "[]", [])
        elif isinstance(kind, type) and issubclass(kind, Sequence):
            yield Variant("", "a list", ["\n\n\n"])
        else:
            yield Variant("", "a value", WORD)

    def _objects(self, kind: Any, seen: tuple[Any, ...]) -> Iterator[Variant]:
        if kind in seen:
            return
        if _is_model(kind):
            # A block of an answer, which may be sent back as it came.
            fields = {name: field.annotation for name, field in kind.model_fields.items()}
            needed = {name for name, field in kind.model_fields.items() if field.is_required()}
        else:
            fields = typing.get_type_hints(kind, include_extras=True)
            needed = {name for name, one in fields.items() if get_origin(one) is Required}
        optional = fields.keys() - needed
        needed |= self._needed.get(kind.__name__, set())
        options = {n: list(self.variants(one, n, (*seen, kind))) for n, one in fields.items()}
        plain = {name: options[name][0].value for name in fields if name in needed}
        type_ = plain.get("type")
        yield Variant("", f"an object of type {type_}" if type_ else "an object", plain)
        if type_ is not None and self._expanded is not None and type_ not in self._expanded:
            return
        for name, values in options.items():
            if self._nulls and name in optional:
                yield Variant(f".{name}", "null", {**plain, name: None}, null=True)
            for one in values[1:] if name in needed else values:
                yield one._replace(where=f".{name}{one.where}", value={**plain, name: one.value})


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


_PUBLISHED = Published(values=_VALUES, texts=_TEXTS, expanded=_WITH_CHOICES)

_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
_TOOLS: dict[str, list[Json]] = {
    CHAT: [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}],
    MESSAGES: [{"name": "look_up", "input_schema": SCHEMA}],
}
# What a field takes effect with, by the schemas' own words.
_TOGETHER: dict[str, Json] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "function_call": {"functions": [{"name": "look_up", "parameters": SCHEMA}]},
}
_PARAMS = {
    CHAT: (completion_create_params.CompletionCreateParamsBase, ChatCompletionMessageParam),
    MESSAGES: (message_create_params.MessageCreateParamsBase, MessageParam),
}


def fields(path: str) -> set[str]:
    """Names of what a request of an API may have."""
    return {"stream", *typing.get_type_hints(_PARAMS[path][0])}


def cases(path: str) -> Iterator[Case]:
    """Requests of an API, one for each choice that its schema leaves."""
    whole, message = _PARAMS[path]
    plain = {"max_tokens": 2, "messages": [{"role": "user", "content": "go on"}]}
    for where, choice, given, _ in _PUBLISHED.variants(message):
        body = {**plain, "messages": _history(path, given)}
        yield Case(path, f"{given['role']} message{where}", choice, body)
    for name, kind in typing.get_type_hints(whole, include_extras=True).items():
        if name == "messages":
            continue
        more = dict(_TOGETHER.get(name, {}))
        if name == "tool_choice":
            more["tools"] = _TOOLS[path]
        for where, choice, value, _ in _PUBLISHED.variants(kind, name):
            yield Case(path, name + where, choice, {**plain, **more, name: value})
    for stream in (True, False, None) if path == CHAT else (True, False):
        yield Case(path, "stream", str(stream), {**plain, "stream": stream})


def _history(path: str, message: Json) -> list[Json]:
    """A conversation in which a message may stand."""
    go_on = {"role": "user", "content": "go on"}
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    kinds = {block.get("type") for block in blocks if isinstance(block, dict)}
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "on"}
        if "tool_result" in kinds:
            return [go_on, {"role": "assistant", "content": [call]}, message]
        if "tool_use" in kinds:
            return [go_on, message, {"role": "user", "content": [result]}]
    elif message["role"] == "tool":
        return [go_on, {"role": "assistant", "tool_calls": [_CALL]}, message]
    elif message["role"] == "function":
        return [go_on, {"role": "assistant", "function_call": _CALL["function"]}, message]
    elif message.get("tool_calls"):
        return [go_on, message, {"role": "tool", "tool_call_id": "call_1", "content": "on"}]
    if message["role"] == "user":
        return [message]
    return [go_on, message, go_on] if message["role"] == "assistant" else [message, go_on]
