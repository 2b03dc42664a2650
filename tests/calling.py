"""Requests with tools and a format of the answer in each API, and what their answers say."""

import json
from typing import Any

import httpx

from conserve.apis import CHAT, MESSAGES, RESPONSES

Json = dict[str, Any]


def wanted(path: str, schema: Json) -> Json:
    """Fields by which an answer has to fit a schema."""
    named = {"type": "json_schema", "name": "r", "schema": schema}
    if path == MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if path == RESPONSES:
        return {"text": {"format": named}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def request(
    path: str,
    said: str,
    functions: list[Json],
    choice: str | None = "auto",
    *,
    single: bool = False,
) -> Json:
    """A request with tools. ``choice`` is a chat's, or the name of a tool."""
    user, is_named = (
        [{"role": "user", "content": said}],
        choice in [one["name"] for one in functions],
    )
    if path == MESSAGES:
        kind = "tool" if is_named else {"required": "any", None: "auto"}.get(choice, choice)
        chosen: Json = {"type": kind, **({"name": choice} if is_named else {})}
        chosen |= {"disable_parallel_tool_use": True} if single else {}
        tools = [{**one, "input_schema": one["parameters"]} for one in functions]
        for one in tools:
            del one["parameters"]
        return {"messages": user, "max_tokens": 200, "tools": tools, "tool_choice": chosen}
    more: Json = {"parallel_tool_calls": False} if single else {}
    if path == RESPONSES:
        flat = [{"type": "function", **one} for one in functions]
        named: Any = {"type": "function", "name": choice}
        more |= {"input": user, "store": False, "max_output_tokens": 200, "tools": flat}
    else:
        nested = [{"type": "function", "function": one} for one in functions]
        named = {"type": "function", "function": {"name": choice}}
        more |= {"messages": user, "max_tokens": 200, "tools": nested}
    return {**more, "tool_choice": named if is_named else choice}


def read(path: str, reply: httpx.Response) -> tuple[str, list[tuple[str, Any]]]:
    """The text of an answer, and its calls with their arguments."""
    stream = reply.headers["content-type"].startswith("text/event-stream")
    lines = reply.text.splitlines() if stream else [f"data: {reply.text}"]
    told = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
    calls: list[list[str]] = []
    if path == RESPONSES:
        items = (told[-1]["response"] if stream else told[0])["output"]
        texts = [part["text"] for one in items for part in one.get("content") or ()]
        calls = [[one["name"], one["arguments"]] for one in items if one["type"] == "function_call"]
    elif path == CHAT:
        parts = [one["delta" if stream else "message"] for all_ in told for one in all_["choices"]]
        texts = [part.get("content") or "" for part in parts]
        for call in (call for part in parts for call in part.get("tool_calls") or ()):
            calls += [["", ""]] if call.get("id") else []
            calls[-1][0] += call["function"].get("name") or ""
            calls[-1][1] += call["function"].get("arguments") or ""
    else:
        blocks = [one["content_block"] for one in told if "content_block" in one]
        blocks = blocks or told[0]["content"]
        texts = [block.get("text") or "" for block in blocks]
        calls = [[one["name"], json.dumps(one["input"])] for one in blocks if "input" in one]
        if stream:
            deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
            texts = [delta.get("text", "") for delta in deltas]
            given = "".join(delta.get("partial_json", "") for delta in deltas).replace("}{", "}\n{")
            calls = [[name, one] for (name, _), one in zip(calls, given.splitlines(), strict=True)]
    return "".join(texts).strip(), [(name, json.loads(given)) for name, given in calls]
