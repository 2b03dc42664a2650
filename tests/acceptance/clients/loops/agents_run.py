"""An agent on the OpenAI Agents SDK, over either of its APIs."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from loop import MODEL, arguments, bash, instructions
from openai import AsyncOpenAI

MODELS = {
    "/v1/chat/completions": OpenAIChatCompletionsModel,
    "/v1/responses": OpenAIResponsesModel,
}


async def main() -> None:
    given = arguments()
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=given.base_url, api_key="unused", max_retries=0)
    agent = Agent(
        name="agent",
        instructions=instructions(given.run),
        tools=[function_tool(bash)],
        model=MODELS[given.api](model=MODEL, openai_client=client),
    )
    result = await Runner.run(agent, given.task, max_turns=8)
    print(result.final_output)


asyncio.run(main())
