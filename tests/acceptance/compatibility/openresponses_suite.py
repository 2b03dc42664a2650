"""Open Responses' compliance tests, from its repository; bun, which runs them, is from npm."""

import json
import shutil
import subprocess
from pathlib import Path

from tests.acceptance.compatibility.outcomes import Outcome, SuiteError

REPOSITORY = "https://github.com/openresponses/openresponses"
COMMIT = "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"
LIST = Path(__file__).with_name("openresponses.toml")

# What the compliance tests need, of all that their repository has; versions as in its lock file.
_PACKAGES = ("bun@1.4.5", "zod@3.25.76")


class OpenResponsesSuite:
    """Its tests, laid out to be run.

    Args:
        folder: kept between runs, for what is downloaded.
        checkout: a clone that has `COMMIT`; none: it is cloned.

    Raises:
        SuiteError: it cannot be had.
    """

    def __init__(self, folder: Path, checkout: Path | None = None) -> None:
        # Below the folder with the packages, where they are looked for.
        self._packages = folder / "openresponses"
        self._folder = self._packages / "repository"
        self._packages.mkdir(parents=True, exist_ok=True)
        if checkout is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if not self._folder.exists():
            source = REPOSITORY if checkout is None else str(checkout)
            self._get(["git", "clone", "--quiet", "--no-checkout", source, str(self._folder)])
        self._get(["git", "-C", str(self._folder), "checkout", "--quiet", "--detach", COMMIT])
        self._bun = self._packages / "node_modules" / ".bin" / "bun"
        if not self._bun.exists():
            options = ["--no-audit", "--no-fund", "--no-package-lock"]
            self._get(["npm", "install", "--prefix", str(self._packages), *options, *_PACKAGES])

    def run(self, url: str, model: str) -> dict[str, Outcome]:
        """Try all cases on what serves there.

        Raises:
            SuiteError: the tests did not run to their end.
        """
        command = [
            *(str(self._bun), "run", "bin/compliance-test.ts"),
            *("--base-url", f"{url}/v1", "--api-key", "unused", "--model", model, "--json"),
        ]
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, timeout=900, check=False
        )
        (self._packages / "log.txt").write_text(done.stdout + done.stderr)
        try:
            results = json.loads(done.stdout)["results"]
        except ValueError as error:
            raise SuiteError(
                f"Open Responses' tests did not run to their end: {done.stderr[-2000:]}"
            ) from error
        return {
            result["id"]: Outcome(
                result["status"] == "passed",
                f"{result['status']}: {'; '.join(result.get('errors') or [])}",
            )
            for result in results
        }

    def _get(self, command: list[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise SuiteError(
                f"{command[0]} is not installed: Open Responses' tests need git and npm"
            ) from error
        if done.returncode:
            raise SuiteError(
                f"`{' '.join(command)}` failed:\n{done.stderr[-2000:]}\nWhere it cannot be cloned, "
                f"name a clone that has {COMMIT[:12]}: make test-compatibility OPENRESPONSES=path"
            )
