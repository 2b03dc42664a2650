"""An agent on the `openai` client: what it is told is kept in a list, and sent again."""

import json
from typing import Any

import openai
from loop import MODEL, arguments, bash, instructions

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command"}},
            "required": ["command"],
        },
    },
}


def main() -> None:
    given = arguments()
    client = openai.OpenAI(base_url=given.base_url, api_key="unused", max_retries=0)
    messages: list[Any] = [
        {"role": "system", "content": instructions(given.run)},
        {"role": "user", "content": given.task},
    ]
    while True:
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = bash(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)


main()
