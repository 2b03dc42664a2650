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
import psutil

from conserve.embedded import model_path
from conserve.launch import Launch, _adopt_orphans
from tests.acceptance.pages.page import Block
from tests.at_start import FOLDER
from tests.checkout import ROOT
from tests.engines.applications import START_S
from tests.engines.processes import kill, processes, require_none_left
from tests.nvml.standin import VARIABLE, Machine

# A demo or a benchmark of a page takes minutes on two cores.
_RUN_S = 900.0
_ENDS_WITHIN_S = 60.0
_LAST_CHARACTERS = 3000
_MODEL = re.compile(r"\bmodel[=:] ?([\w.-]+/[\w.-]+)", re.IGNORECASE)
_COPY = "git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t"
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
# The environment is as it is: `make` takes nothing in the copy for newer.
_MAKE = f'#!/bin/bash\nexec {shutil.which("make")} -o .venv/.installed "$@"\n'


class _Server(Launch):
    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def interrupt(self) -> None:
        """Interrupt its shell and all that runs there, like Ctrl-C in a terminal."""
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
        self._folder, self._work = folder, folder / "conserve"
        self._server: _Server | None = None
        _adopt_orphans()
        self._machine = Machine(folder / "gpus", gpus=8, real_time=True)
        self._machine.have_driver("580.65.06", (13, 0))
        for gpu in self._machine.gpus:
            gpu.be_an_h100()
            gpu.memory_bytes = 81_559 << 20
        home, programs, gpu_bin = folder / "home", folder / "bin", self._work / ".venv-gpu/bin"
        for made in (home, programs, gpu_bin):
            made.mkdir(parents=True)
        subprocess.run(f"{_COPY} {shlex.quote(str(self._work))}", cwd=ROOT, shell=True, check=True)
        (self._work / ".venv").symlink_to(ROOT / ".venv")
        for name in set(_MODEL.findall(page)):
            (self._work / name).parent.mkdir(exist_ok=True)
            (self._work / name).symlink_to(model_path())
        # An answer of 400 or more is an error to curl.
        (home / ".curlrc").write_text("fail-with-body\n")
        (gpu_bin / "activate").write_text(f"PATH={shlex.quote(str(programs))}:$PATH\n")
        for name, text in (("conserve", _CONSERVE), ("make", _MAKE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
            (gpu_bin / name).symlink_to(programs / name)
        foreign = ("CONSERVE_", "HF_", "RAY_", "XDG_", "VIRTUAL_", "http_", "HTTP_", "all_", "ALL_")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{programs}:{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{FOLDER}:{ROOT}",
        }
        # Variables that a block leaves for the next one.
        self._variables = folder / "variables"
        self._variables.write_text(f"PWD={shlex.quote(str(self._work))}\n")

    def write(self, block: Block) -> None:
        (self._work / str(block.file)).write_text(block.text)

    def run(self, block: Block) -> None:
        """Run a block; fails if it ends with another status than 0."""
        log = self._folder / f"line-{block.line}.log"
        if block.serves:
            self._serve(block, log)
            return
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(block), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment,
            )  # fmt: skip
            deadline_s = time.monotonic() + _RUN_S
            while (status := process.poll()) is None and time.monotonic() < deadline_s:
                self._reap(but=process.pid)
                time.sleep(0.2)
            process.kill()
        said = log.read_text(errors="replace")
        _log.info("line %d:\n%s%s", block.line, block.text, said)
        assert status == 0, f"line {block.line} ended with {status}: {said[-_LAST_CHARACTERS:]}"

    def _reap(self, but: int) -> None:
        """Wait for what earlier blocks have left in the background, as their shell would.

        Until then what has ended is there yet, to a block that waits for its end.
        """
        server = None if self._server is None else self._server.pid
        for one in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if one.pid not in (but, server) and one.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(one.pid, os.WNOHANG)

    def _serve(self, block: Block, log: Path) -> None:
        self.end()
        self._server = _Server([], log, self._environment, self._command(block))
        self._server.__enter__()
        port = re.search(r"\bport=(\d+)|$", block.text)[1] or 8000
        url = f"http{'s' if 'tls' in block.text else ''}://127.0.0.1:{port}/health"
        deadline_s = time.monotonic() + START_S
        while not _answers(url):
            late = not self._server.running or time.monotonic() > deadline_s
            said = log.read_text(errors="replace")[-_LAST_CHARACTERS:]
            assert not late, f"the server of line {block.line} is not ready: {said}"
            time.sleep(0.5)

    def _command(self, block: Block) -> list[str]:
        text, variables = block.text, shlex.quote(str(self._variables))
        if block.language == "python":
            file = self._folder / f"line-{block.line}.py"
            file.write_text(text)
            text = f"python {shlex.quote(str(file))}\n"
        self._machine.keep_gpus(block.gpus)
        card = f"{VARIABLE}={shlex.quote(str(self._machine.file))}"
        script = self._folder / f"line-{block.line}.sh"
        script.write_text(
            # Each variable is exported, and so kept.
            f'set -ae -o pipefail\n. {variables}\ncd "$PWD"\n'
            + ("" if block.serves else f"trap 'export -p > {variables}' EXIT\n")
            + f"{card if block.gpus else f'unset {VARIABLE}'}\n{text}"
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


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=15, verify=False, trust_env=False).status_code == 200
    return False
