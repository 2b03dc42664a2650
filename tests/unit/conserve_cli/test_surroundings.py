"""Environments that an application would not start in, and files of runs that have ended."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conserve.launch import ended, hold
from tests.checkout import ROOT

_PROBE = """
import json, os, sys
from conserve_cli.surroundings import adapt, notes
adapt()
print(json.dumps([{**os.environ, "utf8": str(sys.flags.utf8_mode)}, notes]))
"""


@pytest.mark.parametrize(
    ("given", "becomes", "said"),
    [
        ({"HOME": "/nonexistent"}, {"HOME": "/tmp/conserve-{uid}"}, "The home folder is /tmp/con"),
        ({"TMPDIR": "/nonexistent"}, {"TMPDIR": "/tmp"}, "Temporary files are in /tmp, not in"),
        ({"TMPDIR": "{tmp}/\u00fc"}, {"TMPDIR": "/tmp"}, "of at most 39 ASCII characters"),
        ({"TMPDIR": "{tmp}/t"}, {"TMPDIR": "{tmp}/t", "HOME": "{tmp}"}, ""),
        ({"NO_PROXY": "a.b"}, {"no_proxy": "a.b,localhost,127.0.0.1,::1"}, ""),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"utf8": "1"}, ""),
    ],
)
def test_what_an_application_would_not_start_with_is_replaced_and_said(
    given: dict[str, str], becomes: dict[str, str], said: str
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as tmp:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": tmp}
        environment |= {name: value.format(tmp=tmp) for name, value in given.items()}
        if (folder := environment.get("TMPDIR", "")).startswith(tmp):
            Path(folder).mkdir()
        command = [sys.executable, "-c", _PROBE]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        found, notes = json.loads(done.stdout)
    wanted = {name: value.format(tmp=tmp, uid=os.getuid()) for name, value in becomes.items()}
    assert {name: found[name] for name in wanted} == wanted
    assert said in "".join(notes)
    assert bool(notes) == bool(said)


def test_files_of_ended_runs_go_but_for_the_last_four(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.log" for number in range(7)]
    for file in files:
        file.touch()
    with files[1].open() as held:
        hold(held.fileno())
        assert ended(tmp_path.iterdir()) == [files[0], files[2]]
    assert ended(tmp_path.iterdir()) == files[:3]
