"""Runs the embedded model that sees on held-out screens: ``python -m scripts.seeing.evaluate``.

Starts vLLM's own server on the shipped model, or uses the one at ``--url``, and has agents click
through screens by the official client, greedily.
"""

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path

import openai

from conserve.settings import EMBEDDED_MODELS
from conserve_lab.agent import client_complete, run_agent
from conserve_lab.agent.screens import CLICK, Walk
from scripts.embedded.evaluate import server

MODEL = "embedded-vision"
_MAX_TOKENS = 64


async def evaluate(url: str, walks: list[Walk], at_once: int) -> list[str | None]:
    """Have an agent do each walk, ``at_once`` at a time; return their answers."""
    gate = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", timeout=600) as client:
        complete = client_complete(client, EMBEDDED_MODELS[MODEL], max_tokens=_MAX_TOKENS)

        async def one(walk: Walk) -> str | None:
            async with gate:
                turns = len(walk.screens)
                done = await run_agent(
                    complete, walk.messages(), [CLICK], walk.run, max_turns=turns
                )
                return done.answer

        return await asyncio.gather(*map(one, walks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server of the model that parses tool calls")
    parser.add_argument("--screens", type=int, default=500, help="how many screens to click on")
    parser.add_argument("--at-once", type=int, default=8, help="conversations at the same time")
    parser.add_argument("--dtype", default="bfloat16", help="of the server that is started")
    parser.add_argument("--log", type=Path, default=Path("evaluate-vllm.log"), help="its log")
    arguments = parser.parse_args()
    walks: list[Walk] = []
    left = arguments.screens
    while left:
        clicks = min(left, 1 + len(walks) % 7)
        walks.append(Walk.draw(f"evaluate/{len(walks)}", "held-out", clicks))
        left -= clicks
    with contextlib.ExitStack() as stack:
        url = arguments.url
        if url is None:
            url = stack.enter_context(server(arguments.dtype, arguments.log, MODEL))
        began_s = time.monotonic()
        answers = asyncio.run(evaluate(url, walks, arguments.at_once))
    print(f"{len(walks)} held-out conversations, {time.monotonic() - began_s:.0f} s")
    hits = sum(sum(walk.hits) for walk in walks)
    print(f"right clicks:  {hits} of {arguments.screens} ({hits / arguments.screens:.1%})")
    right = sum(walk.answer == answer for walk, answer in zip(walks, answers, strict=True))
    print(f"right answers: {right} of {len(walks)} ({right / len(walks):.1%})")
    asked, hit = Counter[int](), Counter[int]()
    for walk in walks:
        asked.update(range(1, len(walk.screens)))
        hit.update(number for number, good in enumerate(walk.hits, start=1) if good)
    for number, count in sorted(asked.items()):
        print(f"  on screen {number}: {hit[number]} of {count}")


if __name__ == "__main__":
    main()
