"""A conversation, and its requests in each API."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

IMAGE = "data:image/png;base64,AAAA"


@dataclass
class Call:
    name: str
    arguments: Json
    id: str


@dataclass
class Said:
    """One step: a user's message, an answer, or the results of its calls.

    Attributes:
        texts: of a user's message, or of each result.
        image: whether an image comes with a user's message.
    """

    who: str
    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    image: bool = False
    reasoning: str | None = None


@dataclass
class Told:
    """A conversation: the system's prompt, its tools, and what is said."""

    system: str | None
    tools: list[Json]
    steps: list[Said]


def words(rng: random.Random) -> str:
    return " ".join(rng.choices(["file", "Zürich", '"a"', "{", "a\nb", "42", "</p>"], k=4))


def random_answer(rng: random.Random) -> Said:
    calls = [
        Call(rng.choice(["read", "write"]), {words(rng): rng.choice([1, 2.5, None, [True]])},
             f"call_{rng.randrange(10**9)}")
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]  # fmt: skip
    texts = [words(rng)] if not calls or rng.random() < 0.5 else []
    return Said("assistant", texts, calls, reasoning=words(rng) if rng.random() < 0.3 else None)


def random_conversation(rng: random.Random, answers: int) -> Told:
    """A conversation that ends with a user's message or results, after this many answers."""
    told = Told(
        words(rng) if rng.random() < 0.8 else None,
        [
            {"name": "read", "description": words(rng), "parameters": {"type": "object"}},
            {"name": "write", "parameters": {"type": "object", "properties": {}}},
        ],
        [Said("user", [words(rng) for _ in range(rng.choice([1, 1, 2]))])],
    )
    for _ in range(answers):
        told.steps.append(random_answer(rng))
        told.steps.append(following(told.steps[-1], rng))
    return told


def following(answer: Said, rng: random.Random) -> Said:
    """The step after an answer: its calls' results, or a user's message."""
    if answer.calls:
        return Said("tools", [words(rng) for _ in answer.calls], answer.calls)
    return Said("user", [words(rng)], image=rng.random() < 0.2)


def chat(told: Told, rng: random.Random) -> Json:
    messages: list[Json] = []
    if told.system is not None:
        role = rng.choice(["system", "developer"])
        messages.append({"role": role, "content": _either(told.system, "text", rng)})
    for step in told.steps:
        if step.who == "tools":
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": _either(text, "text", rng)}
                for call, text in zip(step.calls, step.texts, strict=True)
            ]
        elif step.who == "user":
            messages.append({"role": "user", "content": _chat_parts(step, rng)})
        else:
            messages.append(chat_answer(step, rng))
    tools = [{"type": "function", "function": tool} for tool in told.tools]
    return {"messages": messages, "tools": tools}


def chat_answer(step: Said, rng: random.Random) -> Json:
    message: Json = {"role": "assistant", "content": step.texts[0] if step.texts else None}
    if step.reasoning is not None and rng.random() < 0.5:
        message["reasoning_content"] = step.reasoning
    if step.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in step.calls
        ]
    return message


def _chat_parts(step: Said, rng: random.Random) -> Any:
    if not step.image and len(step.texts) == 1 and rng.random() < 0.5:
        return step.texts[0]
    parts: list[Json] = [{"type": "text", "text": text} for text in step.texts]
    if step.image:
        parts.append({"type": "image_url", "image_url": {"url": IMAGE}})
    return parts


def _either(text: str, kind: str, rng: random.Random) -> Any:
    return text if rng.random() < 0.5 else [{"type": kind, "text": text}]


def messages(told: Told, rng: random.Random) -> Json:
    found: list[Json] = []
    for step in told.steps:
        if step.who == "tools":
            blocks: list[Json] = [
                {"type": "tool_result", "tool_use_id": call.id, "content": _either(t, "text", rng)}
                for call, t in zip(step.calls, step.texts, strict=True)
            ]
            found.append({"role": "user", "content": blocks})
        elif step.who == "user":
            blocks = [{"type": "text", "text": text} for text in step.texts]
            if step.image:
                source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
                blocks.append({"type": "image", "source": source})
            plain = len(blocks) == 1 and rng.random() < 0.5
            found.append({"role": "user", "content": step.texts[0] if plain else blocks})
        else:
            found.append({"role": "assistant", "content": blocks_of(step)})
    body: Json = {
        "messages": found,
        "tools": [
            {
                "input_schema": tool["parameters"],
                **{name: tool[name] for name in ("name", "description") if name in tool},
            }
            for tool in told.tools
        ],
    }
    if told.system is not None:
        billing = f"x-anthropic-billing-header: cch={rng.randrange(16**5):05x};"
        blocks = [{"type": "text", "text": text} for text in (billing, told.system)]
        body["system"] = told.system if rng.random() < 0.5 else blocks
    return body


def blocks_of(step: Said) -> list[Json]:
    blocks: list[Json] = []
    if step.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": step.reasoning, "signature": "x"})
    blocks += [{"type": "text", "text": text} for text in step.texts]
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in step.calls
    ]
    return blocks


def responses(told: Told, rng: random.Random) -> Json:
    items: list[Json] = []
    for step in told.steps:
        if step.who == "tools":
            items += [
                {
                    "type": "function_call_output",
                    "call_id": call.id,
                    "output": _either(text, "input_text", rng),
                }
                for call, text in zip(step.calls, step.texts, strict=True)
            ]
        elif step.who == "user":
            parts: list[Json] = [{"type": "input_text", "text": text} for text in step.texts]
            if step.image:
                parts.append({"type": "input_image", "image_url": IMAGE, "detail": "auto"})
            plain = len(parts) == 1 and rng.random() < 0.5
            kind = {"type": "message"} if rng.random() < 0.5 else {}
            items.append({**kind, "role": "user", "content": step.texts[0] if plain else parts})
        else:
            items += items_of(step, rng)
    body: Json = {"input": items, "tools": [{"type": "function", **tool} for tool in told.tools]}
    if told.system is not None:
        if rng.random() < 0.5:
            body["instructions"] = told.system
        else:
            items.insert(0, {"role": "developer", "content": told.system})
    elif len(items) == 1 and isinstance(items[0]["content"], str):
        body["input"] = items[0]["content"]
    return body


def items_of(step: Said, rng: random.Random) -> list[Json]:
    items: list[Json] = []
    if step.reasoning is not None:
        content = [{"type": "reasoning_text", "text": step.reasoning}]
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
    for text in step.texts:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        own = {"id": f"msg_{rng.random()}", "status": "completed"} if rng.random() < 0.5 else {}
        items.append({"type": "message", "role": "assistant", "content": content, **own})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{rng.random()}",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments),
        }
        for call in step.calls
    ]
    return items


# --- Answers as clients get them ------------------------------------------------------------------


def event(kind: str, **more: Any) -> bytes:
    """An event as vLLM writes it."""
    data = json.dumps({"type": kind, **more}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def message_body(step: Said) -> bytes:
    body = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "stop_reason": "end_turn"}
    blocks = blocks_of(step) or [{"type": "text", "text": ""}]
    return json.dumps({**body, "content": blocks}).encode()


def message_stream(step: Said) -> list[bytes]:
    """The events of a Messages stream."""
    head = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "content": []}
    found = [event("message_start", message=head)]
    for index, block in enumerate(blocks_of(step)):
        kind = block["type"]
        if kind == "thinking":
            empty, deltas = {"thinking": ""}, [("thinking_delta", "thinking", block["thinking"])]
            deltas.append(("signature_delta", "signature", "x"))
        elif kind == "text":
            half = len(block["text"]) // 2
            empty = {"text": ""}
            deltas = [("text_delta", "text", t) for t in (block["text"][:half],
                                                          block["text"][half:])]  # fmt: skip
        else:
            empty = {"id": block["id"], "name": block["name"], "input": {}}
            text = json.dumps(block["input"])
            deltas = [("input_json_delta", "partial_json", t) for t in (text[:3], text[3:])]
        found.append(
            event("content_block_start", index=index, content_block={"type": kind, **empty})
        )
        found += [
            event("content_block_delta", index=index, delta={"type": type_, name: value})
            for type_, name, value in deltas
        ]
        found.append(event("content_block_stop", index=index))
    found.append(event("message_delta", delta={"stop_reason": "end_turn"}, usage={}))
    return [*found, event("message_stop")]


def response_object(step: Said, status: str = "completed") -> Json:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "output": items_of(step, random.Random(1)),
    }


def response_stream(step: Said) -> list[bytes]:
    """The events of a Responses stream, without those of its text."""
    begun = {**response_object(step, "in_progress"), "output": []}
    return [
        event("response.created", response=begun, sequence_number=0),
        event("response.in_progress", response=begun, sequence_number=1),
        event("response.output_text.delta", delta="a", item_id="m", sequence_number=2),
        event("response.completed", response=response_object(step), sequence_number=3),
    ]
