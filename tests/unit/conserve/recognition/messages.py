"""Messages and engines' answers that the tests of recognition share."""

import json
import random
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]

SEEDS = st.integers(0, 2**32)

SYSTEM = {"role": "system", "content": "You are a helpful agent."}
USER = {"role": "user", "content": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def never_busy(_: str) -> bool:
    return False


def said(content: Any = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def called(arguments: Any, name: str = "search", id: str = "call_1") -> Message:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return said(None, tool_calls=[call])


def text_of(rng: random.Random) -> str:
    words = ["flight", "Zürich", "\U0001f600", '"quoted"', "{", "a\nb", "42", "</p>"]
    return " ".join(rng.choices(words, k=rng.randint(1, 12)))


def random_answer(rng: random.Random) -> Message:
    answer: Message = said(text_of(rng) if rng.random() < 0.7 else None)
    answer |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    answer["reasoning_content"] = text_of(rng) if rng.random() < 0.3 else None
    if rng.random() < 0.2:
        answer["content"] = f"<think>{text_of(rng)}</think>\n\n{answer['content'] or ''}"
    answer["tool_calls"] = [
        {
            "id": f"call_{rng.random()}",
            "type": "function",
            "function": {
                "name": rng.choice(["search", "book"]),
                "arguments": json.dumps({text_of(rng): rng.choice([1, 2.5, None, [text_of(rng)]])})
                if rng.random() < 0.8
                else rng.choice(["", "{}", '{"cut": "of']),
            },
        }
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    return answer
