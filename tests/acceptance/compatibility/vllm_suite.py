"""vLLM's own tests of its server, from the source distribution of the version that engines run."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conserve.embedded import model_path
from tests.acceptance.compatibility.outcomes import Outcome, SuiteError
from tests.checkout import ROOT

VERSION = "0.32.0"
LIST = Path(__file__).with_name("vllm.toml")

_SUITE = tomllib.loads(LIST.read_text())["suite"]
FILES = _SUITE["files"]
# Where a file takes its server from beside the class: a fixture of the folder's.
_SERVERS = ("RemoteOpenAIServer", "client: openai.")
MODEL = "conserve-embedded"

_PLUGIN = Path(__file__).with_name("plugin")


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
        _pip_install(self._packages, _SUITE["requirements"])

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
            how: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
            done = subprocess.run(command, cwd=self._folder, env=environment, check=False, **how)
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
        if unknown := there.symmetric_difference([*FILES, *_SUITE["left_out"]]):
            raise SuiteError(
                f"these are not vLLM {VERSION}'s tests, or the lists in {LIST} are not right: "
                f"{', '.join(sorted(unknown))}"
            )

    def _rename_models(self) -> None:
        for file in FILES:
            path = self._entrypoints / file
            text = path.read_text()
            for model in _SUITE["models"]:
                text = text.replace(f'"{model}"', f'"{MODEL}"')
            path.write_text(text)


def _downloaded(folder: Path) -> Path:
    archive = folder / f"vllm-{VERSION}.tar.gz"
    if not archive.exists():
        tools = folder / "build-packages"
        _pip_install(tools, _SUITE["build_requirements"])
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
