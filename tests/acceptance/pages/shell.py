"""A shell in a copy of the checkout, where a page's blocks run one after the other."""

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx

from conserve.embedded import model_path
from conserve.launch import Launch
from tests.acceptance.pages.page import Block
from tests.at_start import FOLDER
from tests.checkout import ROOT
from tests.engines.applications import START_S
from tests.engines.processes import kill, processes, require_none_left
from tests.nvml.standin import VARIABLE, Machine

# A demo, a benchmark or a test of a page takes minutes on two cores.
_RUN_S = 900.0
_ENDS_WITHIN_S = 60.0
_LAST_LINES = 30
_MODEL = re.compile(r"\bmodel[=:] ?([\w.-]+/[\w.-]+)", re.IGNORECASE)
_log = logging.getLogger(__name__)

# The command as it is written passes all checks of a start on the stand-in card. Then its engines
# run on the CPU.
_CONSERVE = f"""#!/bin/bash
real={shlex.quote(str(ROOT / ".venv/bin/conserve"))}
if [[ -z ${VARIABLE} || $1 != serve || " $* " == *" --plan "* ]]; then exec "$real" "$@"; fi
"$real" serve --plan "${{@:2}}" || exit
unset {VARIABLE}
for word; do [[ $word == gpus=* ]] || words+=("$word"); done
exec "$real" "${{words[@]}}" device=cpu
"""
# What the environment has is not installed again, since the copy's files are newer.
_MAKE = f"""#!/bin/bash
exec {shutil.which("make")} -o .venv/.installed -o .venv-gpu/.installed "$@"
"""


class _Server(Launch):
    """A server's shell, with what it started."""

    def interrupt(self) -> None:
        """Interrupt all of it, like Ctrl-C in a terminal."""
        assert self._process is not None
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGINT)
            self._process.wait(_ENDS_WITHIN_S)


class Shell:
    """Runs blocks in bash, which keeps variables and the working folder between them.

    Args:
        folder: gets the home, the copy of the checkout, and what blocks print.
        page: the page's whole text, for the models that it names.
    """

    def __init__(self, folder: Path, page: str) -> None:
        self._folder = folder
        self._server: _Server | None = None
        self._machine = Machine(folder / "gpus", gpus=8, real_time=True)
        for gpu in self._machine.gpus:
            gpu.be_an_h100()
            gpu.memory_bytes = 81_559 << 20
        self._home, self._work = folder / "home", folder / "conserve"
        self._home.mkdir()
        # An answer of 400 or more is an error to curl.
        (self._home / ".curlrc").write_text("fail-with-body\n")
        self._environment = self._new_environment(folder / "bin")
        (folder / "variables").touch()
        _copy_checkout(self._work)
        gpu_bin = self._work / ".venv-gpu/bin"
        gpu_bin.parent.mkdir()
        gpu_bin.symlink_to(folder / "bin")
        (gpu_bin / "activate").write_text(f"PATH={shlex.quote(str(folder / 'bin'))}:$PATH\n")
        for name in set(_MODEL.findall(page)):
            (self._work / name).parent.mkdir(exist_ok=True)
            (self._work / name).symlink_to(model_path())

    def _new_environment(self, programs: Path) -> dict[str, str]:
        programs.mkdir()
        for name, text in (("conserve", _CONSERVE), ("make", _MAKE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CONSERVE_", "HF_", "RAY_", "XDG_", "VIRTUAL_ENV"))
        }
        return kept | {
            "HOME": str(self._home),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{programs}:{ROOT / '.venv/bin'}:{kept['PATH']}",
            "PYTHONPATH": f"{FOLDER}:{ROOT}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def write(self, block: Block) -> None:
        """Write a block to the file that its comment names."""
        assert block.file is not None
        (self._work / block.file).parent.mkdir(parents=True, exist_ok=True)
        (self._work / block.file).write_text(block.text)

    def run(self, block: Block) -> None:
        """Run a block; fails if it ends with another status than 0."""
        if block.serves:
            self._serve(block)
            return
        log = self._folder / f"line-{block.line}.log"
        with log.open("wb") as output:
            status = subprocess.run(
                self._command(block), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment, timeout=_RUN_S, check=False,
            ).returncode  # fmt: skip
        _log.info("line %d:\n%s%s", block.line, block.text, log.read_text())
        assert status == 0, f"line {block.line} ended with {status}: {block.text}{_last(log)}"

    def _serve(self, block: Block) -> None:
        self.end()
        log = self._folder / f"line-{block.line}.log"
        self._server = _Server([], log, self._environment, self._command(block))
        self._server.__enter__()
        given = re.search(r"\bport=(\d+)", block.text)
        scheme = "https" if "tls" in block.text else "http"
        url = f"{scheme}://127.0.0.1:{given[1] if given else 8000}/ready"
        deadline_s = time.monotonic() + START_S
        while not _answers(url):
            said = f"the server of line {block.line} is not ready: {block.text}"
            assert self._server.running, f"{said}{_last(log)}"
            assert time.monotonic() < deadline_s, f"{said}{_last(log)}"
            time.sleep(0.5)
        _log.info("line %d:\n%s%s", block.line, block.text, log.read_text())

    def _command(self, block: Block) -> list[str]:
        text, variables = block.text, shlex.quote(str(self._folder / "variables"))
        if block.language == "python":
            file = self._folder / f"line-{block.line}.py"
            file.write_text(text)
            text = f"python {shlex.quote(str(file))}\n"
        self._machine.keep_gpus(block.gpus)
        card = f"{VARIABLE}={shlex.quote(str(self._machine.file))}"
        keep = "" if block.serves else f"trap 'export -p > {variables}' EXIT\n"
        script = self._folder / f"line-{block.line}.sh"
        script.write_text(
            # Each variable is exported, and so kept.
            f"set -ae -o pipefail\nPWD={shlex.quote(str(self._work))}\n. {variables}\n"
            f'cd "$PWD"\n{keep}{card if block.gpus else f"unset {VARIABLE}"}\n{text}'
        )
        return ["bash", str(script)]

    def end(self) -> None:
        """Interrupt the server; fails if a process of the page is left then."""
        if self._server is not None:
            self._server.interrupt()
            self._server = None
        try:
            require_none_left()
        finally:
            for process in processes(""):
                kill(process.pid)


def _copy_checkout(folder: Path) -> None:
    """Copy what Git tracks, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=15, verify=False, trust_env=False).status_code == 200
    return False


def _last(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
