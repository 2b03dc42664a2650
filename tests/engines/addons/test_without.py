"""The application without add-ons: it serves, and refuses each one's settings in one line."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from conserve.launch import Launch
from tests.checkout import ROOT
from tests.engines.applications import START_S, URL

SERVE = [sys.executable, "-m", "conserve_cli.main", "serve"]
SMALL = ("prefillers=0", "decoders=1", "pausing=off", "engine.dtype=float32")


# A setting that only the add-on can follow.
SETTINGS = {
    "conserve_tools": "environments.enabled=true",
    "conserve_inside": "engine_scheduler=conversation",
}


@pytest.mark.full
def test_the_core_serves_without_any_addon(machine_alone: None, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    # Every process of the application begins with this, and so lacks the add-ons.
    names = ["conserve_lab", *SETTINGS]
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in names)]
    (absent / "sitecustomize.py").write_text("\n".join(lines))
    environment = {"PYTHONPATH": os.pathsep.join([str(absent), str(ROOT)])}

    for addon, setting in SETTINGS.items():
        refused = subprocess.run(
            [*SERVE, *SMALL, setting], env=os.environ | environment,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert refused.returncode != 0
        assert f"needs the add-on {addon}, which is not installed" in refused.stderr
        assert refused.stderr.startswith(setting.partition("=")[0])
        assert len(refused.stderr.strip().splitlines()) == 1

    with Launch(SMALL, tmp_path / "serve.log", environment, [*SERVE, *SMALL]) as application:
        application.wait_until_serving(URL, 0, 1, timeout_s=START_S)
        turn = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx.post(f"{URL}/v1/chat/completions", json=turn, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
