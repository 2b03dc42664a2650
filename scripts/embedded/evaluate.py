"""Runs the embedded model on held-out tasks: ``python -m scripts.embedded.evaluate``.

Starts vLLM's own server on the shipped model, or uses the one at ``--url``, and runs the agent's
loop through the official client, greedily, with the real tools.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
from rich.progress import Progress

from conserve.engines import engine_environment, model_source
from conserve.settings import EMBEDDED_MODEL, EMBEDDED_MODELS
from conserve_lab.agent import Score, Session, client_complete, make_session, run_agent, score
from conserve_lab.peers.plan import server_command

MODEL = EMBEDDED_MODELS[EMBEDDED_MODEL]
_PORT = 8193
_MAX_TOKENS = 256
_START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def server(dtype: str, log: Path, model: str = EMBEDDED_MODEL) -> Iterator[str]:
    """Run vLLM's own server on an embedded model; yield its URL."""
    arguments = {
        "dtype": dtype,
        "max_model_len": 16384,
        "enforce_eager": True,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    command = server_command(model_source(model), EMBEDDED_MODELS[model], _PORT, arguments)
    environment = engine_environment(model, gpu=False)
    url = f"http://127.0.0.1:{_PORT}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output
        )
        try:
            _wait_until_serving(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_serving(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"vLLM did not start; see {log}")
        time.sleep(0.5)


async def evaluate(url: str, sessions: list[Session], at_once: int) -> list[list[Score]]:
    """Run all sessions, ``at_once`` at a time; a session's tasks follow one another."""
    gate = asyncio.Semaphore(at_once)
    async with contextlib.AsyncExitStack() as stack:
        bar = stack.enter_context(Progress())
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", timeout=600)
        )
        complete = client_complete(client, MODEL, max_tokens=_MAX_TOKENS)
        done = bar.add_task("sessions", total=len(sessions))

        async def one(session: Session) -> list[Score]:
            messages = [{"role": "system", "content": session.system}]
            scores = []
            async with gate:
                for task in session.tasks:
                    messages.append({"role": "user", "content": task.question})
                    run = await run_agent(complete, messages, session.schemas, session.toolbox.run)
                    messages = run.messages
                    scores.append(score(task, run))
            bar.advance(done)
            return scores

        return await asyncio.gather(*map(one, sessions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server of the embedded model that parses tool calls")
    parser.add_argument("--tasks", type=int, default=500, help="how many tasks")
    parser.add_argument("--at-once", type=int, default=16, help="sessions at the same time")
    parser.add_argument("--dtype", default="bfloat16", help="of the server that is started")
    parser.add_argument("--log", type=Path, default=Path("evaluate-vllm.log"), help="its log")
    arguments = parser.parse_args()
    sessions: list[Session] = []
    left = arguments.tasks
    while left:
        tasks = min(left, 1 + len(sessions) % 2)
        sessions.append(make_session(f"evaluate/{len(sessions)}", "held-out", tasks=tasks))
        left -= tasks
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(server(arguments.dtype, arguments.log))
        print(f"serving after {time.monotonic() - started_s:.0f} s")
        started_s = time.monotonic()
        scores = [
            s for each in asyncio.run(evaluate(url, sessions, arguments.at_once)) for s in each
        ]
    took_s = time.monotonic() - started_s
    calls, right_calls = sum(s.calls for s in scores), sum(s.right_calls for s in scores)
    right = sum(s.right_answer for s in scores)
    print(f"{len(scores)} held-out tasks in {len(sessions)} sessions, {took_s:.0f} s")
    print(f"right calls:   {right_calls} of {calls} ({right_calls / calls:.1%})")
    print(f"right answers: {right} of {len(scores)} ({right / len(scores):.1%})")
    by_steps = Counter(s.calls for s in scores)
    right_by_steps = Counter(s.calls for s in scores if s.right_answer)
    for steps, count in sorted(by_steps.items()):
        print(f"  of {steps} calls: {right_by_steps[steps]} of {count}")


if __name__ == "__main__":
    main()
