"""What the small agents here share: their instructions, their tool, their command line."""

import argparse
import subprocess

MODEL = "conserve-embedded"

_INSTRUCTIONS = """\
You are an agent that works in a folder by means of a shell. Run {run}.

How you work:
- You are given one task. You do it step by step, with one command at a time, and look at what each
  command has printed before you decide what comes next.
- A command runs in the folder that you were started in, in a shell of its own: variables and
  changes of directory are gone after it. It may take a minute at most.
- You change nothing outside of the folder, and nothing in it that the task does not speak of. You
  install nothing, and reach for nothing over a network.
- If a command fails, you read what it has printed, and try something else. After three failures of
  the same kind you stop, and say what is in the way.
- When the task is done, you say so in one or two sentences, without a command, and add nothing.

What is expected of an answer:
- It is short, plain English. No headings, no lists, no tables.
- It names files by their path within the folder.
- It tells no more than what was done and what was seen.
"""


def arguments() -> argparse.Namespace:
    """``base_url``, ``task``, ``run`` and the path of the ``api``."""
    parser = argparse.ArgumentParser()
    for name in ("base_url", "task", "run", "api"):
        parser.add_argument(name)
    return parser.parse_args()


def instructions(run: str) -> str:
    """A system prompt of several chunks of KV; ``run`` tells it from other runs' from there on."""
    return _INSTRUCTIONS.format(run=run)


def bash(command: str) -> str:
    """Run a command; what it prints, and how it ended."""
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    return f"{done.stdout}{done.stderr}exit status {done.returncode}"
