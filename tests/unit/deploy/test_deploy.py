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
from functools import cache
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
OVERLAYS, COMPONENTS = (
    sorted((DEPLOY / "kubernetes" / kind).iterdir()) for kind in ("overlays", "components")
)
SCHEMAS = json.loads(lzma.decompress(Path(__file__).with_name("schemas.json.xz").read_bytes()))
UNIT = (DEPLOY / "systemd" / "conserve.service").read_text()
# A drain takes `drain_timeout_s`, the time for engines to leave, and then, as in `Launch.stop`, time
# for Ray, for what is left of it, and for the command's own process.
ENDS_WITHIN_S = _ENDS_WITHIN_S + 20 + 3 + 20 + 10
NAME = {"app.kubernetes.io/name": "conserve"}
# Maps whose names are an operator's, or fields that select a schema.
FREE = {"annotations", "apiVersion", "data", "environment", "kind", "labels", "limits"}
FREE |= {"matchLabels", "nodeSelector", "rayStartParams", "requests", "selector"}


def read(path: Path) -> list[Json]:
    # By way of JSON, since what YAML's aliases stand for would be one object.
    return [json.loads(json.dumps(one)) for one in yaml.safe_load_all(path.read_text())]


def build(folder: Path, objects: list[Json]) -> list[Json]:
    """Return the objects of a kustomization; a component changes those that there are."""
    (file,) = read(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "patches"}
    assert file.keys() <= known
    for path in (folder / name for name in file.get("resources", ())):
        objects = build(path, objects) if path.is_dir() else [*objects, *read(path)]
    for made in file.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in made["files"]}
        one = {"apiVersion": "v1", "kind": "ConfigMap", "data": data}
        objects = [*objects, one | {"metadata": {"name": made["name"]}}]
    for patch in file.get("patches", ()):
        assert patch["target"].keys() == {"kind", "name"}
        steps = yaml.safe_load(patch.get("patch") or (folder / patch["path"]).read_text())
        for one in objects:
            if patch["target"] == {"kind": one["kind"], "name": one["metadata"]["name"]}:
                for step in steps:
                    change(one, **step)
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


def within(document: Any, key: str) -> Iterator[Json]:
    """Yield all objects in a document that have a field."""
    if isinstance(document, dict) and key in document:
        yield document
    for one in document.values() if isinstance(document, dict) else document:
        if isinstance(one, dict | list):
            yield from within(one, key)


@cache
def validator(kind: str) -> Any:
    schema = {**SCHEMAS["kinds"][kind], "definitions": SCHEMAS["definitions"]}
    return jsonschema_rs.Draft7Validator(schema)


def refused(one: Json) -> list[str]:
    errors = validator(f"{one['apiVersion']} {one['kind']}").iter_errors(one)
    return [f"{one['kind']} {error.instance_path}: {error.message}" for error in errors]


def unnoticed(document: Any, is_valid: Callable[[], bool]) -> list[str]:
    """Return the fields that may be misspelt, each alone."""
    found = []
    for key, value in [*(document.items() if isinstance(document, dict) else enumerate(document))]:
        if isinstance(document, dict) and key not in FREE - {"annotations", "labels", "selector"}:
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


def of(objects: list[Json], kind: str) -> list[Json]:
    return [one for one in objects if one["kind"] == kind]


def test_each_object_fits_its_schema_and_no_field_may_be_misspelt(objects: list[Json]) -> None:
    assert [complaint for one in objects for complaint in refused(one)] == []
    assert len({(one["kind"], one["metadata"]["name"]) for one in objects}) == len(objects)
    for one in objects:
        assert unnoticed(one, lambda one=one: not refused(one)) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_same(overlay: Path, objects: list[Json], tmp_path: Path) -> None:
    here = {"resources": [overlay], "components": COMPONENTS}
    lists = {key: [os.path.relpath(one, tmp_path) for one in found] for key, found in here.items()}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(lists))
    text = subprocess.check_output(["kubectl", "kustomize", tmp_path], text=True)
    # These names say their content too, so that a change starts new pods.
    built = [*yaml.safe_load_all(re.sub(r"(conserve-(settings|dashboard))-\w{10}\b", r"\1", text))]
    for one in built:
        assert one["metadata"].pop("namespace", "conserve") == "conserve"
    by_id = [
        {f"{one['kind']} {one['metadata']['name']}": one for one in found}
        for found in (built, objects)
    ]
    assert by_id[0] == by_id[1]


def test_pods_are_a_users_without_privileges(objects: list[Json]) -> None:
    claims = {one["metadata"]["name"] for one in of(objects, "PersistentVolumeClaim")}
    assert {one["claimName"] for one in within(objects, "claimName")} <= claims
    assert not of(objects, "Secret")
    for pod in within(objects, "containers"):
        user = pod["securityContext"]
        assert (user["runAsUser"], user["runAsNonRoot"], user["fsGroup"]) == (1000, True, 1000)
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
            assert mounts["/tmp"] == "tmp"
            assert {*mounts.values()} <= {one["name"] for one in pod["volumes"]}


def test_the_docs_say_how_to_make_each_secret(objects: list[Json]) -> None:
    named = {one["secretName"] for one in within(objects, "secretName")}
    for field in ("secretKeyRef", "credentials"):
        named |= {one[field]["name"] for one in within(objects, field)}
    assert {"conserve-keys", "conserve-hub", "conserve-prometheus", "conserve-tls"} == named
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    assert all(re.search(rf"create secret \w+ {name} ", text) for name in named)


def test_the_application_takes_keys_and_has_time_to_drain(
    overlay: Path, objects: list[Json]
) -> None:
    files = [one["data"].get("settings.yaml") for one in of(objects, "ConfigMap")]
    files += [one["spec"]["serveConfigV2"] for one in of(objects, "RayService")]
    files += [(overlay / "app.yaml").read_text()] if of(objects, "RayCluster") else []
    (given,) = (yaml.safe_load(one) for one in files if one)
    if "applications" in given:
        assert given["proxy_location"] == "Disabled"
        given = given["applications"][0]["args"]
    settings = load(given)
    assert (settings.host, settings.port, settings.unauthenticated) == ("0.0.0.0", 8000, False)
    assert settings.keys_file == "/etc/conserve/keys/keys.json"
    assert settings.on_nodes(1).nodes == ("one" if of(objects, "Deployment") else "several")
    # The router's; its hook takes time, too.
    (pod,) = (one for one in within(objects, "containers") if "lifecycle" in str(one))
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_timeout_s + ENDS_WITHIN_S + 5


def test_only_the_routers_port_is_open(objects: list[Json]) -> None:
    policies = [one["spec"] for one in of(objects, "NetworkPolicy")]
    assert all(one["podSelector"] == {"matchLabels": NAME} for one in policies)
    router, *others = (rule for one in policies for rule in one["ingress"])
    assert router == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    for rule in others:
        (who,) = rule["from"]
        if who != {"podSelector": {"matchLabels": NAME}}:
            assert who == {"namespaceSelector": {}, "podSelector": operator}
            assert rule["ports"] == [{"port": 8265, "protocol": "TCP"}]
    labels = [one["template"]["metadata"]["labels"].items() for one in within(objects, "template")]
    assert all(NAME.items() <= one for one in labels)
    for one in (*of(objects, "Service"), *of(objects, "PodDisruptionBudget")):
        wanted = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        assert any(wanted.items() - {("ray.io/serve", "true")} <= one for one in labels)


def test_prometheus_has_the_alerts_and_the_job_that_they_ask_for(objects: list[Json]) -> None:
    (rule,), (monitor,) = of(objects, "PrometheusRule"), of(objects, "ServiceMonitor")
    assert [rule["spec"]] == read(ROOT / "deployments" / "monitoring" / "alerts.yaml")
    (service,) = of(objects, "Service")
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "conserve"
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_streams_of_an_hour_and_large_requests_pass_the_ingress(objects: list[Json]) -> None:
    (ingress,), (route,) = of(objects, "Ingress"), of(objects, "HTTPRoute")
    said = {key.partition("/")[2]: one for key, one in ingress["metadata"]["annotations"].items()}
    assert min(int(said["proxy-read-timeout"]), int(said["proxy-send-timeout"])) >= 3600
    most = Settings().max_body_bytes + Settings().media.bytes
    assert int(said["proxy-body-size"].removesuffix("m")) * 2**20 >= most
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "1h", "backendRequest": "1h"}


def test_a_rayservice_has_the_cluster_and_the_application_of_a_raycluster() -> None:
    by_hand, service = (
        DEPLOY / "kubernetes" / "overlays" / name for name in ("raycluster", "rayservice")
    )
    cluster, spec = (build(one, [])[-1]["spec"] for one in (by_hand, service))
    assert spec["rayClusterConfig"] == cluster
    assert [yaml.safe_load(spec["serveConfigV2"])] == read(by_hand / "app.yaml")
    pins = (ROOT / "requirements-gpu.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pins


def test_the_unit_drains_and_locks_memory() -> None:
    said = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert (said["KillMode"], said["KillSignal"]) == ("mixed", "SIGTERM")
    assert said["LimitMEMLOCK"] == "infinity"
    assert float(said["TimeoutStopSec"]) >= Settings().drain_timeout_s + ENDS_WITHIN_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_and_scores_it_as_the_docs_say(tmp_path: Path) -> None:
    def said(unit: str, *command: str) -> str:
        file = tmp_path / "conserve.service"
        file.write_text(unit.replace("/opt/conserve/.venv/bin/conserve", sys.executable))
        return subprocess.run(
            ["systemd-analyze", *command, file],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        ).stdout  # fmt: skip

    assert said(UNIT, "verify") == ""
    assert "KillMod" in said(UNIT.replace("KillMode", "KillMod"), "verify")
    (score,) = re.findall(r"exposure level .*: ([\d.]+)", said(UNIT, "security", "--offline=1"))
    assert f"**{score}**" in (ROOT / "docs" / "services.md").read_text()


def test_the_compose_file_is_valid_closed_and_mounts_what_is_there() -> None:
    folder = DEPLOY / "compose"
    (file,) = read(folder / "compose.yaml")
    is_valid = jsonschema_rs.Draft7Validator(SCHEMAS["compose"]).is_valid
    assert is_valid(file)
    services = file["services"]
    assert unnoticed(services, lambda: is_valid(file)) == [*services]
    settings = load(read(folder / "settings.yaml")[0])
    assert settings.host == "127.0.0.1"
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "password" not in str(file).lower()
    for name, service in services.items():
        assert (service["network_mode"], service.get("ports")) == ("host", None)
        sources = {one.partition(":")[0] for one in service["volumes"]}
        assert all((folder / one).exists() for one in sources - file["volumes"].keys())
        if name.startswith("conserve"):
            grace_s = float(service["stop_grace_period"].removesuffix("s"))
            assert grace_s >= settings.drain_timeout_s + ENDS_WITHIN_S
