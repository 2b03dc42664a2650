"""What a model is made to say: scripts of answers, each chosen by a marker in the prompt.

The embedded model cannot lead a coding agent. So a task names a script, and the model is made to
say its answers one after another (`forced`); everything else, from the chat template to the parser
of tool calls and the KV of every token, is as it always is.
"""

import json
import re
from dataclasses import dataclass

# A task that has "SCRIPT:bash" in it plays the script of that name.
_MARKER = re.compile(r"SCRIPT:([a-z-]+)")
# To whatever belongs to no script's task: titles, summaries and the like, and an engine's warm-up.
ASIDE = "Noted."

# What the scripts leave, in the folder that a client works in.
MARKER_FILE = "marker.txt"
WRITTEN = "begun\ndone\n"
# What docs/guides/agents.md has clients do.
TASK = f"Write two lines to {MARKER_FILE}, one after the other."


@dataclass(frozen=True)
class Step:
    """One answer: text, and a tool call after it where there is one.

    Args:
        text: it tells the answer from all others, so that the script's place is found by it.
        tool: the tool that is called.
        arguments: of the call.
    """

    text: str
    tool: str | None = None
    arguments: tuple[tuple[str, str], ...] = ()

    def rendered(self) -> str:
        """The answer as the embedded model's template and its tool parser (Hermes) have it."""
        if self.tool is None:
            return self.text
        call = json.dumps({"name": self.tool, "arguments": dict(self.arguments)})
        return f"{self.text}\n<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class Script:
    """Answers to one task.

    Args:
        belongs: what every prompt of the task has and no other does; a client asks for a title with
            the task's own words, but without its tools.
        steps: the answers.
    """

    belongs: str
    steps: tuple[Step, ...]


def task(script: str, run: str) -> str:
    """A task that plays a script; ``run`` tells it from other runs' in every cache."""
    return f"SCRIPT:{script} Run {run}. {TASK}"


def answer_to(prompt: str) -> str:
    """What is to be said to a prompt, which ends where the answer begins."""
    found = _MARKER.search(prompt)
    if found is None:
        return ASIDE
    script = SCRIPTS.get(found[1])
    if script is None or script.belongs not in prompt:
        return ASIDE
    said = prompt[found.end() :]
    # Those that were said are there to be found; other answers may be among them (aider's own).
    for step in script.steps:
        if step.text not in said:
            return step.rendered()
    return ASIDE


def _calls(tool: str, argument: str, last: str | None = None) -> Script:
    """Two commands that write the marker file, then an answer, or a third command."""

    def call(text: str, command: str) -> Step:
        return Step(text, tool, ((argument, command),))

    return Script(
        belongs=f'"name": "{tool}"',
        steps=(
            call("I begin with the first line.", f"echo begun > {MARKER_FILE}"),
            call("Then comes the second line.", f"echo done >> {MARKER_FILE}"),
            call("All is written.", last) if last else Step("Both lines are in the file now."),
        ),
    )


def _listing(text: str, *lines: str) -> Step:
    """An edit as aider's format "whole" has it."""
    return Step("\n".join((text, "", MARKER_FILE, "```", *lines, "```")))


SCRIPTS = {
    "bash": _calls("bash", "command"),
    "submit": _calls("bash", "command", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "claude-code": _calls("Bash", "command"),
    "claude-code-helper": Script(
        belongs='"name": "Bash"',
        steps=(
            Step(
                "A helper has a look first.",
                "Agent",
                (("description", "look"), ("prompt", "Look."), ("subagent_type", "looker")),
            ),
            *_calls("Bash", "command").steps,
        ),
    ),
    "codex": _calls("exec_command", "cmd"),
    "aider": Script(
        belongs="*file listing* format",
        steps=(
            _listing("I begin with the first line.", "begun"),
            _listing("The second line has to be another.", "begun", "then"),
            _listing("Both lines are in the file now.", "begun", "done"),
        ),
    ),
}
