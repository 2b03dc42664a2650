"""The application without an add-on: it serves, and refuses the add-on's settings in one line."""

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


# An add-on, and a setting that only it can follow.
@pytest.mark.parametrize(("addon", "setting"), [("conserve_tools", "environments.enabled=true")])
def test_the_core_serves_without_an_addon(
    machine_alone: None, tmp_path: Path, addon: str, setting: str
) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    # Every process of the application begins with this, and so lacks the add-on.
    (absent / "sitecustomize.py").write_text(f"import sys\nsys.modules[{addon!r}] = None\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(absent), str(ROOT)])}

    refused = subprocess.run(
        [*SERVE, *SMALL, setting], env=os.environ | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    name = setting.partition("=")[0]
    assert f"{name} is of the add-on {addon}, which is not installed" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1

    with Launch(SMALL, tmp_path / "serve.log", environment, [*SERVE, *SMALL]) as application:
        application.wait_until_serving(URL, 0, 1, timeout_s=START_S)
        turn = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx.post(f"{URL}/v1/chat/completions", json=turn, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
