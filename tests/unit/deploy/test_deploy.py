"""The files of deploy/ fit their schemas, the settings, docs/security.md and each other.

`build` does what `kubectl kustomize` does, so that these tests need no program beside Python.
"""

import copy
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from conserve.settings import Settings, load
from conserve_cli.launching import _ENDS_WITHIN_S
from tests.checkout import ROOT

Json = dict[str, Any]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted((DEPLOY / "kubernetes" / "overlays").iterdir())
COMPONENTS = sorted((DEPLOY / "kubernetes" / "components").iterdir())
SCHEMAS = json.loads(lzma.decompress(Path(__file__).with_name("schemas.json.xz").read_bytes()))
VALIDATORS: Json = {}
UNIT = (DEPLOY / "systemd" / "conserve.service").read_text()
# A drain takes `drain_timeout_s`, the time for engines to leave, and then, as in `Launch.stop`, for
# Ray, for what is left of it, and for the command's own process.
ENDS_WITHIN_S = _ENDS_WITHIN_S + 20 + 3 + 20 + 10
NAME = {"app.kubernetes.io/name": "conserve"}
# Maps whose names are an operator's.
FREE = {"annotations", "data", "environment", "labels", "limits", "matchLabels", "nodeSelector",
        "rayStartParams", "requests", "selector", "ulimits"}  # fmt: skip


def read(path: Path) -> list[Json]:
    # By way of JSON, since what YAML's aliases stand for would be one object.
    return [json.loads(json.dumps(one)) for one in yaml.safe_load_all(path.read_text())]


def build(folder: Path, objects: list[Json]) -> list[Json]:
    """Return the objects of a kustomization; a component changes those that there are."""
    (file,) = read(folder / "kustomization.yaml")
    for path in (folder / name for name in file.pop("resources", ())):
        objects = build(path, objects) if path.is_dir() else [*objects, *read(path)]
    for made in file.pop("configMapGenerator", ()):
        metadata = {"name": made["name"]}
        data = {name: (folder / name).read_text() for name in made["files"]}
        objects.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    for patch in file.pop("patches", ()):
        assert patch["target"].keys() == {"kind", "name"}
        for one in objects:
            if patch["target"] == {"kind": one["kind"], "name": one["metadata"]["name"]}:
                text = patch.get("patch") or (folder / patch["path"]).read_text()
                for step in yaml.safe_load(text):
                    change(one, **step)
    assert file.keys() <= {"apiVersion", "kind", "namespace"}
    return objects


def change(document: Json, op: str, path: str, value: Any = None, **source: str) -> None:
    """Take one step of a JSON patch (RFC 6902)."""
    if op == "copy":
        value = copy.deepcopy(at(document, source["from"].split("/")[1:]))
    *places, key = path.split("/")[1:]
    parent = at(document, places)
    if isinstance(parent, list) and op != "replace":
        parent.insert(len(parent) if key == "-" else int(key), value)
    else:
        assert op != "replace" or at(parent, [key]) is not None
        parent[int(key) if isinstance(parent, list) else key.replace("~1", "/")] = value


def at(document: Any, places: list[str]) -> Any:
    for place in places:
        document = document[int(place) if isinstance(document, list) else place]
    return document


def within(document: Any, key: str) -> Iterator[Any]:
    """Yield the values of a field, wherever it is in a document."""
    for name, one in document.items() if isinstance(document, dict) else enumerate(document):
        if name == key:
            yield one
        if isinstance(one, dict | list):
            yield from within(one, key)


def of(objects: list[Json], kind: str) -> list[Json]:
    return [one for one in objects if one["kind"] == kind]


def refused(one: Json) -> list[str]:
    if (
        schema := SCHEMAS["kinds"].get(kind := f"{one.get('apiVersion')} {one.get('kind')}")
    ) is None:
        return [f"no schema of {kind}"]
    if kind not in VALIDATORS:
        VALIDATORS[kind] = jsonschema_rs.Draft7Validator(
            {**schema, "definitions": SCHEMAS["definitions"]}
        )
    return [f"{kind}: {error}" for error in VALIDATORS[kind].iter_errors(one)]


def unnoticed(document: Any, is_valid: Callable[[], bool]) -> list[str]:
    """Return the fields that may be misspelt, each alone."""
    found = []
    for key, value in [*(document.items() if isinstance(document, dict) else enumerate(document))]:
        if isinstance(document, dict):
            document[f"{key}x"] = document.pop(key)
            found += [key] if is_valid() else []
            document[key] = document.pop(f"{key}x")
        if isinstance(value, dict | list) and key not in FREE:
            found += unnoticed(value, is_valid)
    return found


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def objects(overlay: Path) -> list[Json]:
    """An overlay with all components."""
    found: list[Json] = []
    for folder in (overlay, *COMPONENTS):
        found = build(folder, found)
    return found


def test_each_object_fits_its_schema_and_no_field_may_be_misspelt(objects: list[Json]) -> None:
    for one in objects:
        assert refused(one) == []
        assert unnoticed(one, lambda one=one: not refused(one)) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_same(overlay: Path, objects: list[Json], tmp_path: Path) -> None:
    here = {"resources": [overlay], "components": COMPONENTS}
    lists = {key: [os.path.relpath(one, tmp_path) for one in found] for key, found in here.items()}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(lists))
    text = subprocess.check_output(["kubectl", "kustomize", tmp_path], text=True)
    # Two names say their content too, so that a change starts new pods.
    text = re.sub(r"\b(conserve-(settings|dashboard))-\w{10}\b", r"\1", text)
    built = list(yaml.safe_load_all(text.replace("\n  namespace: conserve\n", "\n")))
    by_id, there = (
        {f"{one['kind']} {one['metadata']['name']}": one for one in each}
        for each in (objects, built)
    )
    assert by_id == there
    assert len(objects) == len(built) == len(by_id)


def test_pods_are_a_users_without_privileges(objects: list[Json]) -> None:
    claims = {one["metadata"]["name"] for one in of(objects, "PersistentVolumeClaim")}
    assert {*within(objects, "claimName")} <= claims
    for pod in (one["spec"] for one in within(objects, "template")):
        user, closed = pod["securityContext"], {"allowPrivilegeEscalation": False}
        assert (user["runAsNonRoot"], user["fsGroup"]) == (True, 1000)
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        closed |= {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == closed
            mounted = {one["name"] for one in container["volumeMounts"]}
            assert {"tmp"} <= mounted <= {one["name"] for one in pod["volumes"]}


def test_the_docs_say_how_to_make_each_secret(objects: list[Json]) -> None:
    named = {
        *within(objects, "secretName"),
        *(one["name"] for one in within(objects, "credentials")),
    }
    named |= {one["name"] for one in within(objects, "secretKeyRef")}
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    assert not of(objects, "Secret")
    assert {*re.findall(r"create secret \w+ (\S+) ", text)} == named


def test_the_application_takes_keys_and_has_time_to_drain(
    overlay: Path, objects: list[Json]
) -> None:
    texts = [*within(objects, "settings.yaml"), *within(objects, "serveConfigV2")]
    texts += [(overlay / "app.yaml").read_text()] if of(objects, "RayCluster") else []
    (given,) = map(yaml.safe_load, texts)
    settings = load(given["applications"][0]["args"] if "applications" in given else given)
    assert (settings.host, settings.port, settings.unauthenticated) == ("0.0.0.0", 8000, False)
    assert settings.keys_file == "/etc/conserve/keys/keys.json"
    assert settings.on_nodes(1).nodes == ("one" if of(objects, "Deployment") else "several")
    # The router's pod; its hook takes time, too.
    (pod,) = (one["spec"] for one in within(objects, "template") if "preStop" in str(one))
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_timeout_s + ENDS_WITHIN_S + 5


def test_only_the_routers_port_is_open(objects: list[Json]) -> None:
    own, operator = {"matchLabels": NAME}, {"app.kubernetes.io/name": "kuberay-operator"}
    policies = [one["spec"] for one in of(objects, "NetworkPolicy")]
    assert all(one["podSelector"] == own for one in policies)
    from_operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": operator}}
    rules = [rule for one in policies for rule in one["ingress"]]
    assert rules[0] == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert rules[1:] in (
        [],
        [
            {"from": [{"podSelector": own}]},
            {"ports": [{"port": 8265, "protocol": "TCP"}], "from": [from_operator]},
        ],
    )
    pods = [one["metadata"]["labels"].items() for one in within(objects, "template")]
    assert all(NAME.items() <= one for one in pods)
    for one in (*of(objects, "Service"), *of(objects, "PodDisruptionBudget")):
        wanted = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        assert any(wanted.items() - {("ray.io/serve", "true")} <= one for one in pods)


def test_prometheus_has_the_alerts_and_the_job_that_they_ask_for(objects: list[Json]) -> None:
    (rule,), (monitor,) = of(objects, "PrometheusRule"), of(objects, "ServiceMonitor")
    assert [rule["spec"]] == read(ROOT / "deployments" / "monitoring" / "alerts.yaml")
    (service,) = of(objects, "Service")
    assert service["metadata"]["labels"] == monitor["spec"]["selector"]["matchLabels"] == NAME
    assert monitor["spec"]["jobLabel"] in NAME
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_streams_of_an_hour_and_large_requests_pass_the_ingress(objects: list[Json]) -> None:
    (ingress,), (route,) = of(objects, "Ingress"), of(objects, "HTTPRoute")
    said = {key.partition("/")[2]: one for key, one in ingress["metadata"]["annotations"].items()}
    assert said["proxy-read-timeout"] == said["proxy-send-timeout"] == "3600"
    most = Settings().max_body_bytes + Settings().media.bytes
    assert int(said["proxy-body-size"].removesuffix("m")) * 2**20 >= most
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "1h", "backendRequest": "1h"}


def test_a_rayservice_has_the_cluster_and_the_application_of_a_raycluster() -> None:
    folders = [DEPLOY / "kubernetes" / "overlays" / name for name in ("raycluster", "rayservice")]
    cluster, service = (build(folder, [])[-1]["spec"] for folder in folders)
    assert service["rayClusterConfig"] == cluster
    assert [yaml.safe_load(service["serveConfigV2"])] == read(folders[0] / "app.yaml")
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "requirements-gpu.txt").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_and_scores_it_as_the_docs_say(tmp_path: Path) -> None:
    file = tmp_path / "conserve.service"

    def analyzed(unit: str, *command: str) -> str:
        file.write_text(unit.replace("/opt/conserve/.venv/bin/conserve", sys.executable))
        line = f"systemd-analyze {' '.join(command)} {file} 2>&1"
        return subprocess.run(line, shell=True, stdout=-1, text=True, check=False).stdout

    assert analyzed(UNIT, "verify") == ""
    assert "KillMod" in analyzed(UNIT.replace("KillMode", "KillMod"), "verify")
    (score,) = re.findall(r"level .*: ([\d.]+)", analyzed(UNIT, "security --offline=true"))
    assert f"**{score}**" in (ROOT / "docs" / "services.md").read_text()


def test_the_unit_and_compose_drain_on_loopback_and_mount_what_is_there() -> None:
    folder = DEPLOY / "compose"
    (file,), (given,) = read(folder / "compose.yaml"), read(folder / "settings.yaml")
    is_valid = jsonschema_rs.Draft7Validator(SCHEMAS["compose"]).is_valid
    services, settings = file["services"], load(given)
    assert is_valid(file)
    for service in services.values():
        assert unnoticed(service, lambda: is_valid(file)) == []
        assert (service["network_mode"], service.get("ports")) == ("host", None)
        sources = {one.partition(":")[0] for one in service["volumes"]}
        assert all((folder / one).exists() for one in sources - file["volumes"].keys())
    assert settings.host == "127.0.0.1"
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "password" not in (str(file) + UNIT).lower()
    graces = re.findall(r"TimeoutStopSec=(\d+)", UNIT)
    graces += [one.removesuffix("s") for one in within(file, "stop_grace_period")]
    assert min(map(int, graces)) >= settings.drain_timeout_s + ENDS_WITHIN_S
    assert "KillMode=mixed\nKillSignal=SIGTERM\n" in UNIT
