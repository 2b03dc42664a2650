"""vLLM's own tests of its server, from the source distribution of the version that engines run."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from conserve.embedded import model_path
from tests.acceptance.compatibility.outcomes import Outcome, SuiteError
from tests.checkout import ROOT

VERSION = "0.32.0"
LIST = Path(__file__).with_name("vllm.toml")

# In vLLM's tests/entrypoints: what speaks to a server by one of the APIs that the router has.
FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_namespace_tool_separator.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
)
# What would as well, and is about a server or a model of another kind.
LEFT_OUT = {
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py": "`--enable-prompt-embeds`",
    "openai/chat_completion/test_enable_force_include_usage.py": "`--enable-force-include-usage`",
    "openai/chat_completion/test_extra_content_fields.py": "a translation model's chat template",
    "openai/chat_completion/test_root_path.py": "`--root-path`",
    "openai/chat_completion/test_serving_chat.py": "gpt-oss",
    "openai/chat_completion/test_thinking_token_budget.py": "`--reasoning-config`",
    "openai/completion/test_completion_with_prompt_embeds.py": "`--enable-prompt-embeds`",
    "openai/completion/test_tensorizer_entrypoint.py": "`--load-format`",
    "openai/completion/test_token_in_token_out.py": "`--skip-tokenizer-init`",
    "openai/correctness/test_lmeval.py": "how good a model of 1.5 B parameters is",
    "openai/responses/test_harmony.py": "gpt-oss, and a server of tools",
    "openai/responses/test_mcp_tools.py": "gpt-oss, and a server of tools",
    "openai/responses/test_parsable_context.py": "a server of tools",
    "openai/test_openai_schema.py": "schemathesis, which `make test-fuzz` uses",
}
# Where a file takes its server from beside the class: a fixture of the folder's.
_SERVERS = ("RemoteOpenAIServer", "client: openai.")
# The models that these tests ask for. The embedded one is asked for instead.
_MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "claude-3-7-sonnet-latest",
    "facebook/opt-125m",
    "openai-community/gpt2",
)
MODEL = "conserve-embedded"

_PLUGIN = Path(__file__).with_name("plugin")
# What vLLM's tests import beside ConServe's own requirements, and the clients that they are for:
# later ones have not all of the parameters.
_REQUIREMENTS = (
    "anthropic==0.112.0",
    "distro==1.9.0",
    "openai==2.44.0",
    "pytest-asyncio==1.5.0",
    "sniffio==1.3.1",
    "tblib==3.2.2",
)
# What pip wants to have, to look at the source distribution; nothing is built.
_BUILD_REQUIREMENTS = (
    "semantic-version==2.10.0",
    "setuptools-rust==1.13.0",
    "setuptools-scm==9.2.2",
)


class VllmSuite:
    """vLLM's tests, laid out to be run.

    Args:
        folder: kept between runs, for what is downloaded.
        checkout: vLLM's source at `VERSION`; none: pip downloads it.

    Raises:
        SuiteError: it cannot be had, or is not what is expected.
    """

    def __init__(self, folder: Path, checkout: Path | None = None) -> None:
        self._folder = folder / "vllm"
        self._packages = folder / "packages"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        tests = self._folder / "tests"
        if checkout is None:
            _unpack(_downloaded(folder), self._folder)
        else:
            if not (checkout / "tests" / "entrypoints").is_dir():
                raise SuiteError(f"{checkout} has no tests/entrypoints: give a checkout of vLLM")
            shutil.copytree(checkout / "tests", tests)
        self._entrypoints = tests / "entrypoints"
        self._require_all_known()
        self._rename_models()
        # Tests load tokenizers by the model's name, from the folder that they run in.
        (self._folder / MODEL).symlink_to(model_path())
        _pip_install(self._packages, _REQUIREMENTS)

    def run(self, url: str, cases: Iterable[str] = FILES) -> dict[str, Outcome]:
        """Try cases on what serves there: files, or cases by the names that outcomes have.

        Raises:
            SuiteError: the tests did not run to their end.
        """
        found = self._folder / "outcomes.json"
        found.unlink(missing_ok=True)
        log = self._folder / "log.txt"
        search = (str(self._folder), str(self._packages), str(_PLUGIN))
        environment = {
            **os.environ,
            "CONSERVE_SUITE_URL": url,
            "CONSERVE_SUITE_OUTCOMES": str(found),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(search),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-p", "stand_in", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", str(self._folder), "--timeout", "180", "-v"),
            *("-o", "asyncio_default_fixture_loop_scope=function"),
            *(f"tests/entrypoints/{case}" for case in cases),
        ]
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        # 1: some tests failed.
        if done.returncode not in (0, 1) or not found.exists():
            raise SuiteError(f"vLLM's tests did not run to their end; see {log}")
        return {case: Outcome(**outcome) for case, outcome in json.loads(found.read_text()).items()}

    def _require_all_known(self) -> None:
        there = {
            str(file.relative_to(self._entrypoints))
            for folder in ("anthropic", "openai")
            for file in (self._entrypoints / folder).rglob("test_*.py")
            if any(server in file.read_text() for server in _SERVERS)
        }
        if unknown := there.symmetric_difference([*FILES, *LEFT_OUT]):
            raise SuiteError(
                f"these are not vLLM {VERSION}'s tests, or the lists in {__file__} are not right: "
                f"{', '.join(sorted(unknown))}"
            )

    def _rename_models(self) -> None:
        for file in FILES:
            path = self._entrypoints / file
            text = path.read_text()
            for model in _MODELS:
                text = text.replace(f'"{model}"', f'"{MODEL}"')
            path.write_text(text)


def _downloaded(folder: Path) -> Path:
    archive = folder / f"vllm-{VERSION}.tar.gz"
    if not archive.exists():
        tools = folder / "build-packages"
        _pip_install(tools, _BUILD_REQUIREMENTS)
        # pip asks a source distribution for its metadata. This one has none of its own, and is
        # asked in an environment that has what it needs, which would else be gigabytes.
        environment = {
            **os.environ,
            "PYTHONPATH": str(tools),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": VERSION,
        }
        _pip(
            [
                *("download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"),
                *("--dest", str(folder), f"vllm=={VERSION}"),
            ],
            environment,
        )
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    root = f"vllm-{VERSION}/"
    with tarfile.open(archive) as file:
        for member in file:
            if member.name.startswith(f"{root}tests/"):
                member.name = member.name.removeprefix(root)
                file.extract(member, folder, filter="data")


def _pip_install(target: Path, requirements: Iterable[str]) -> None:
    done = target / "installed.txt"
    wanted = "\n".join(requirements)
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(target, ignore_errors=True)
    _pip(["install", "--no-deps", "--target", str(target), *requirements], dict(os.environ))
    done.write_text(wanted)


def _pip(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SuiteError(
            f"pip could not get {arguments[-1]}:\n{done.stderr[-2000:]}\n"
            f"With a checkout of vLLM v{VERSION}: make test-compatibility VLLM=path"
        )
