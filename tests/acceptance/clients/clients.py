"""The clients that are tried: how each is installed, told where to go, and started."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.acceptance.clients.scripts import task
from tests.checkout import ROOT

# `make clients` installs there, each in an environment of its own.
INSTALLED = ROOT / ".clients"
_HERE = Path(__file__).resolve().parent
_REQUIREMENTS = _HERE / "requirements"
_LOOPS = _HERE / "loops"

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

_MODEL = "conserve-embedded"
# What those that ask for a window, and for the longest answer, are told.
_WINDOW_TOKENS, _ANSWER_TOKENS = 32_768, 2048


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
class Start:
    """A client's command line, and its environment beside what all have."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """A client as it is.

    Attributes:
        name: in the table of docs/reference/clients.md.
        package: of which `version` is; its environment goes by the name of the requirements.
        requirements: the file of exact versions; None where it is one of ConServe's own.
        api: the path that it asks for answers.
        script: what it is made to do.
        ids: the headers and the fields of bodies, dotted, that name its conversation.
        start: how it is started, for a task.
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
    start: Callable[[Place, str], Start]
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

    def started(self, place: Place) -> Start:
        """How it is started at a place; its home is written there."""
        start = self.start(place, task(self.script, place.run))
        program = Path(start.command[0])
        assert program.exists(), f"{program} is missing: `make test-clients` installs it"
        return start


def environment(place: Place, start: Start) -> dict[str, str]:
    """All of a client's environment: nothing of the machine's own but where programs are."""
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "HOME": str(place.home),
        "TMPDIR": str(place.home),
        # What is not on loopback is the recorder's to refuse.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), place.url),
        "NO_PROXY": "127.0.0.1",
        "OPENAI_API_KEY": "unused",
        **start.environment,
    }


def _python(requirements: str | None) -> str:
    return sys.executable if requirements is None else f"{INSTALLED / requirements}/bin/python"


def _own_loop(
    name: str, package: str, requirements: str | None, program: str, api: str = CHAT
) -> Client:
    """A library, led by one of the loops here."""

    def start(place: Place, task: str) -> Start:
        return Start(
            [
                *(_python(requirements), str(_LOOPS / program), place.url + "/v1", task),
                *(place.run, api),
            ],
            {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        )

    file = None if requirements is None else f"{requirements}.txt"
    return Client(name, package, file, api, "bash", frozenset(), start)


def _npm(environment: str, program: str) -> str:
    return str(INSTALLED / environment / "node_modules" / program)


def _opencode(place: Place, task: str) -> Start:
    config = {
        "share": "disabled",
        "autoupdate": False,
        "permission": "allow",
        "enabled_providers": ["conserve"],
        "model": f"conserve/{_MODEL}",
        "small_model": f"conserve/{_MODEL}",
        "provider": {
            "conserve": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "ConServe",
                "options": {"baseURL": place.url + "/v1", "apiKey": "unused"},
                "models": {
                    _MODEL: {
                        "name": _MODEL,
                        "limit": {"context": _WINDOW_TOKENS, "output": _ANSWER_TOKENS},
                    }
                },
            }
        },
    }
    file = place.home / "opencode.json"
    file.write_text(json.dumps(config))
    return Start(
        [_npm("opencode", "opencode-linux-x64/bin/opencode"), "run", task],
        {
            "OPENCODE_CONFIG": str(file),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
            "OPENCODE_PURE": "1",
            # Where it would fetch plugins from whatever else it is told: nobody listens there.
            "npm_config_registry": "http://127.0.0.1:9",
        },
    )


def _codex(place: Place, task: str) -> Start:
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""
model = "{_MODEL}"
model_provider = "conserve"
model_context_window = {_WINDOW_TOKENS}
check_for_update_on_startup = false
approval_policy = "never"
sandbox_mode = "danger-full-access"
[analytics]
enabled = false
[feedback]
enabled = false
[features]
plugins = false
remote_plugin = false
plugin_sharing = false
apps = false
[model_providers.conserve]
name = "ConServe"
base_url = "{place.url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
    )
    program = "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
    return Start([_npm("codex", program), "exec", "--skip-git-repo-check", task])


def _claude_code(place: Place, task: str) -> Start:
    program = "@anthropic-ai/claude-code-linux-x64/claude"
    return Start(
        [_npm("claude-code", program), "-p", task, "--allowedTools", "Bash"],
        {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": _MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": _MODEL,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_ANSWER_TOKENS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        },
    )


def _mini_swe_agent(place: Place, task: str) -> Start:
    return Start(
        [
            str(INSTALLED / "mini-swe-agent" / "bin" / "mini"),
            *("-m", f"openai/{_MODEL}", "-y", "--exit-immediately", "-t", task),
            *("-o", str(place.home / "trajectory.json"), "-c", "mini.yaml"),
            *("-c", f"model.model_kwargs.api_base={place.url}/v1"),
            *("-c", "model.cost_tracking=ignore_errors"),
        ],
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(place.home),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )


def _aider(place: Place, task: str) -> Start:
    # What it would fetch: prices and windows of models.
    window = {"max_input_tokens": _WINDOW_TOKENS, "max_output_tokens": _ANSWER_TOKENS}
    caches = place.home / ".aider" / "caches"
    caches.mkdir(parents=True)
    prices = caches / "model_prices_and_context_window.json"
    prices.write_text(json.dumps({f"openai/{_MODEL}": {"litellm_provider": "openai", **window}}))
    return Start(
        [
            str(INSTALLED / "aider" / "bin" / "aider"),
            *("--model", f"openai/{_MODEL}", "--edit-format", "whole", "--map-tokens", "0"),
            *("--no-git", "--no-gitignore", "--no-check-update", "--no-show-release-notes"),
            *("--analytics-disable", "--no-show-model-warnings", "--no-detect-urls"),
            *("--no-suggest-shell-commands", "--yes-always", "--no-pretty", "--no-fancy-input"),
            # Its loop: it edits, runs this, and tells the model what that has printed.
            *("--auto-test", "--test-cmd", "printf 'begun\\ndone\\n' | diff - marker.txt"),
            *("--message", task, "marker.txt"),
        ],
        {
            "OPENAI_API_BASE": place.url + "/v1",
            "AIDER_ANALYTICS": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )


# Light ones, in `make test` too.
LIBRARIES = (
    _own_loop("openai", "openai", None, "openai_loop.py"),
    _own_loop("OpenAI Agents, chat", "openai-agents", "openai-agents", "agents_run.py"),
    _own_loop(
        "OpenAI Agents, responses", "openai-agents", "openai-agents", "agents_run.py", RESPONSES
    ),
    _own_loop("LangGraph", "langgraph", "langgraph", "langgraph_run.py"),
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
        _claude_code,
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
        _codex,
    ),
    Client(
        "opencode",
        "opencode-ai",
        "opencode.json",
        CHAT,
        "bash",
        frozenset({"x-session-id", "x-session-affinity"}),
        _opencode,
        asides=1,
    ),
    Client(
        "mini-swe-agent",
        "mini-swe-agent",
        "mini-swe-agent.txt",
        CHAT,
        "submit",
        frozenset(),
        _mini_swe_agent,
    ),
    Client("aider", "aider-chat", "aider.txt", CHAT, "aider", frozenset(), _aider, appends=False),
)
