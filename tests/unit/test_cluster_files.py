"""The files for `ray up`: what Ray accepts, with all that is needed, deploying what is accepted."""

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from conserve.settings import load
from tests.checkout import ROOT

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
    wanted = {package.rstrip("*") for package in packages} | {"pyproject.toml"}
    wanted |= {project["project"]["readme"], *project["project"]["license-files"]}
    assert wanted <= set(mounts.values())


@pytest.mark.parametrize(("name", "application"), CLUSTERS.items())
def test_what_it_deploys_is_accepted_and_meant_for_several_nodes(
    name: str, application: str
) -> None:
    deploys = [line for line in read(name)["head_start_ray_commands"] if "serve deploy" in line]
    deploy = f"cd ~/conserve && RAY_AUTH_MODE=disabled .venv/bin/serve deploy {application}"
    assert deploys == [deploy]
    (found,) = read(application)["applications"]
    assert read(application)["proxy_location"] == "Disabled"
    # Even though a head starts alone.
    settings = load(found["args"]).on_nodes(1)
    assert (settings.nodes, settings.engine_host) == ("several", "node")
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize("name", CLUSTERS)
def test_whether_ray_asks_for_a_token_is_said_wherever_it_starts(name: str) -> None:
    """Left to Ray, it depends on what lies in the head's home."""
    file = read(name)
    commands = [*file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    starting = [line for line in commands if "ray start" in line or "serve deploy" in line]
    assert len(starting) == 3
    assert all("RAY_AUTH_MODE=disabled" in line for line in starting)


def test_every_tier_of_the_cloud_application_is_a_type_of_node() -> None:
    offered = set()
    for kind in read("deployments/cluster-aws.yaml")["available_node_types"].values():
        offered |= set(kind["resources"]) - {"CPU", "GPU"}
    (found,) = read("deployments/cluster-aws-app.yaml")["applications"]
    settings = load(found["args"])
    assert {settings.prefillers.tier, settings.decoders.tier} == offered


def test_requirements_hold_what_moves_kv() -> None:
    assert "\nnixl-cu12==" in (ROOT / "requirements-cpu.txt").read_text()
