"""The clients that are tried: how each is installed, and started as docs/guides/agents.md says."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.acceptance.clients.scripts import TASK, task
from tests.checkout import ROOT

# `make clients` installs there, each in an environment of its own.
INSTALLED = ROOT / ".clients"
_HERE = Path(__file__).resolve().parent
_REQUIREMENTS = _HERE / "requirements"

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

_AIDER_MODELS = json.dumps(
    {
        "openai/conserve-embedded": {
            "litellm_provider": "openai",
            "max_input_tokens": 32_768,
            "max_output_tokens": 2048,
        }
    }
)

# The page's blocks: each client's settings, by their file in its home, and what runs it.
PAGE = (ROOT / "docs/guides/agents.md").read_text()
BLOCK = re.compile(r"<!-- client: ([^,\n]+)(?:, (\S+))? -->\n```\w+\n(.*?)^```$", re.M | re.S)
_ROLE = "You work in a folder by means of a shell."
# A system prompt of several chunks of KV in place of the libraries' one.
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


@dataclass(frozen=True)
class Place:
    """Where a client runs, and what it may reach.

    Attributes:
        url: of the recorder, which stands for the router.
        home: its home folder; it finds no settings there but what the test has written.
        work: the folder that it works in.
        run: tells its task from those of other runs.
    """

    url: str
    home: Path
    work: Path
    run: str


@dataclass(frozen=True)
class Client:
    """A client as it is.

    Attributes:
        name: in the table of docs/reference/clients.md; on the page, what is before its comma.
        package: of which `version` is; its environment goes by the name of the requirements.
        requirements: the file of exact versions; None where it is one of ConServe's own.
        api: the path that it asks for answers.
        script: what it is made to do.
        ids: the headers and the fields of bodies, dotted, that name its conversation.
        program: its command; of a library, the Python that has it.
        environment: beside what all have, and what the page sets.
        edits: replaced in the page's blocks, beside the place, the model and the task.
        asides: requests that belong to no turn of the task: titles and the like.
        appends: whether each turn begins with what the turn before it was; one that moves or edits
            earlier messages does not.
    """

    name: str
    package: str
    requirements: str | None
    api: str
    script: str
    ids: frozenset[str]
    program: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, str] = field(default_factory=dict)
    asides: int = 0
    appends: bool = True

    @property
    def version(self) -> str:
        """The version that is installed, by the requirements."""
        if self.requirements is None:
            return version(self.package)
        text = (_REQUIREMENTS / self.requirements).read_text()
        if self.requirements.endswith(".json"):
            pinned: str = json.loads(text)["dependencies"][self.package]
            return pinned
        (line,) = (one for one in text.splitlines() if one.startswith(f"{self.package}=="))
        return line.partition("==")[2]

    def command(self, place: Place) -> list[str]:
        """The page's block for it, as a command; files that the page shows are written."""
        assert self.program.exists(), f"{self.program} is missing: `make test-clients` installs it"
        texts = self._texts(place)
        runs = texts.pop("")
        for file, text in texts.items():
            (place.home / file).parent.mkdir(exist_ok=True)
            (place.home / file).write_text(text)
        return [str(self.program) if "python" in self.program.name else "bash", "-c", runs]

    def _texts(self, place: Place) -> dict[str, str]:
        """The page's blocks, by their files: a block without one is run."""
        name = self.name.partition(",")[0]
        texts = {file: text for client, file, text in BLOCK.findall(PAGE) if client == name}
        edits = {
            "http://127.0.0.1:8000": place.url,
            "Qwen/Qwen3-8B": "conserve-embedded",
            TASK: task(self.script, place.run),
            **self.edits,
        }
        if "python" in self.program.name:
            edits[f'"{_ROLE}"'] = repr(_INSTRUCTIONS.format(run=place.run))
        for old, new in edits.items():
            assert any(old in text for text in texts.values()), f"{name}: {old!r} is not there"
            texts = {file: text.replace(old, new) for file, text in texts.items()}
        return texts

    def all_environment(self, place: Place) -> dict[str, str]:
        """Its whole environment: nothing of the machine's own but where programs are."""
        return {
            "PATH": f"{self.program.parent}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HOME": str(place.home),
            "TMPDIR": str(place.home),
            # What is not on loopback is the recorder's to refuse.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), place.url),
            "NO_PROXY": "127.0.0.1",
            **self.environment,
        }


def _library(
    name: str, package: str, api: str = CHAT, edits: Mapping[str, str] | None = None
) -> Client:
    own = package == "openai"
    python = Path(sys.executable) if own else INSTALLED / package / "bin" / "python"
    return Client(
        name,
        package,
        None if own else f"{package}.txt",
        api,
        "bash",
        frozenset(),
        python,
        {"LANGSMITH_TRACING": "false"},
        edits or {},
    )


def _npm(environment: str, program: str) -> Path:
    return INSTALLED / environment / "node_modules" / program


# Light ones, in `make test` too.
LIBRARIES = (
    _library("openai", "openai"),
    _library("OpenAI Agents, chat", "openai-agents"),
    _library(
        "OpenAI Agents, responses",
        "openai-agents",
        RESPONSES,
        {"OpenAIChatCompletionsModel": "OpenAIResponsesModel"},
    ),
    _library("LangGraph", "langgraph"),
)

# Those that bring gigabytes.
PROGRAMS = (
    Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "claude-code.json",
        MESSAGES,
        "claude-code",
        frozenset({"x-claude-code-session-id", "metadata.user_id"}),
        _npm("claude-code", "@anthropic-ai/claude-code-linux-x64/claude"),
    ),
    Client(
        "Codex",
        "@openai/codex",
        "codex.json",
        RESPONSES,
        "codex",
        frozenset(
            {
                *("session-id", "thread-id", "x-codex-window-id", "x-client-request-id"),
                *("client_metadata.session_id", "client_metadata.thread_id"),
                *("client_metadata.x-codex-window-id", "prompt_cache_key"),
            }
        ),
        _npm("codex", "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"),
        edits={
            # A container may not have what its sandbox is made of.
            'sandbox_mode = "workspace-write"\n': """sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[feedback]
enabled = false
[features]
plugins = false
remote_plugin = false
plugin_sharing = false
apps = false
"""
        },
    ),
    Client(
        "opencode",
        "opencode-ai",
        "opencode.json",
        CHAT,
        "bash",
        frozenset({"x-session-id", "x-session-affinity"}),
        _npm("opencode", "opencode-linux-x64/bin/opencode"),
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
            "OPENCODE_PURE": "1",
            # Where it would fetch plugins from whatever else it is told: nobody listens there.
            "npm_config_registry": "http://127.0.0.1:9",
        },
        {
            '"permission": "allow",': '"permission": "allow", "share": "disabled",'
            ' "autoupdate": false, "enabled_providers": ["conserve"],'
        },
        asides=1,
    ),
    Client(
        "mini-swe-agent",
        "mini-swe-agent",
        "mini-swe-agent.txt",
        CHAT,
        "submit",
        frozenset(),
        INSTALLED / "mini-swe-agent" / "bin" / "mini",
        # Its settings are its home's.
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {"mini -m": 'MSWEA_GLOBAL_CONFIG_DIR="$HOME" mini -m'},
    ),
    Client(
        "aider",
        "aider-chat",
        "aider.txt",
        CHAT,
        "aider",
        frozenset(),
        INSTALLED / "aider" / "bin" / "aider",
        {"AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {
            # It would fetch prices and windows of models.
            "aider --model": f"""mkdir -p ~/.aider/caches
echo '{_AIDER_MODELS}' > ~/.aider/caches/model_prices_and_context_window.json
aider --model""",
            # Its loop: it edits, runs this, and tells the model what that has printed.
            "--yes-always": "--yes-always --no-git --no-gitignore --no-check-update"
            " --no-show-release-notes --analytics-disable --no-show-model-warnings"
            " --no-detect-urls --no-suggest-shell-commands --no-pretty --no-fancy-input"
            " --auto-test --test-cmd \"printf 'begun\\ndone\\n' | diff - marker.txt\"",
        },
        appends=False,
    ),
)
