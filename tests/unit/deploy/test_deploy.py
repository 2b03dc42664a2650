"""The files of deploy/ fit their schemas, the settings, the page on security and each other."""

import json
import lzma
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from conserve.settings import Settings, load
from conserve_cli.launching import _ENDS_WITHIN_S
from tests.checkout import ROOT

Json = dict[str, Any]
KUBERNETES, COMPOSE = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "compose"
COMPONENTS = sorted((KUBERNETES / "components").iterdir())
UNIT = (ROOT / "deploy" / "systemd" / "conserve.service").read_text()
SCHEMAS = json.loads(lzma.decompress(Path(__file__).with_name("schemas.json.xz").read_bytes()))
# Beyond `drain_timeout_s`: for engines to leave, and for each thing that `Launch.stop` waits for.
ENDS_WITHIN_S = _ENDS_WITHIN_S + 20 + 3 + 20 + 10
NAME = {"app.kubernetes.io/name": "conserve"}
FIELDS = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "patches"}
# Maps whose names are an operator's.
FREE = {"annotations", "data", "environment", "labels", "limits", "matchLabels", "nodeSelector",
        "rayStartParams", "requests", "selector", "ulimits"}  # fmt: skip


def read(path: Path) -> list[Json]:
    # By way of JSON, since what YAML's aliases stand for would be one object.
    return [json.loads(json.dumps(one)) for one in yaml.safe_load_all(path.read_text())]


def build(folder: Path, objects: Json) -> Json:
    """Add a kustomization's objects to others by kind and name, as `kubectl kustomize` does."""
    (file,) = read(folder / "kustomization.yaml")
    assert file.keys() <= FIELDS
    found = []
    for path in (folder / name for name in file.get("resources", ())):
        found += build(path, objects).values() if path.is_dir() else read(path)
    for made in file.get("configMapGenerator", ()):
        one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}}
        found.append(one | {"data": {name: (folder / name).read_text() for name in made["files"]}})
    objects |= {f"{one['kind']} {one['metadata']['name']}": one for one in found}
    for patch in file.get("patches", ()):
        if (one := objects.get("{kind} {name}".format(**patch["target"]))) is not None:
            for step in yaml.safe_load(patch.get("patch") or (folder / patch["path"]).read_text()):
                change(one, **step)
    return objects


def change(document: Json, op: str, path: str, value: Any = None, **source: str) -> None:
    """Take one step of a JSON patch (RFC 6902)."""
    *places, key = path.split("/")[1:]
    parent = at(document, places)
    if op == "copy":
        value = json.loads(json.dumps(at(document, source["from"].split("/")[1:])))
    if isinstance(parent, list) and op != "replace":
        parent.insert(len(parent) if key == "-" else int(key), value)
    else:
        parent[int(key) if isinstance(parent, list) else key.replace("~1", "/")] = value


def at(document: Any, places: list[str]) -> Any:
    for place in places:
        document = document[int(place) if isinstance(document, list) else place]
    return document


def within(document: Any, *keys: str) -> Iterator[Any]:
    """Yield the values of fields, wherever they are in a document."""
    for name, one in document.items() if isinstance(document, dict) else enumerate(document):
        if name in keys:
            yield one
        if isinstance(one, dict | list):
            yield from within(one, *keys)


def unnoticed(document: Any, whole: Json, validator: Any) -> list[str]:
    """Return the fields that may be misspelt, each alone."""
    found = []
    for key, value in [*(document.items() if isinstance(document, dict) else enumerate(document))]:
        if isinstance(document, dict):
            document[f"{key}x"] = document.pop(key)
            found += [key] if validator.is_valid(whole) else []
            document[key] = document.pop(f"{key}x")
        if isinstance(value, dict | list) and key not in FREE:
            found += unnoticed(value, whole, validator)
    return found


@pytest.fixture(params=sorted((KUBERNETES / "overlays").iterdir()), ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def objects(overlay: Path) -> Json:
    """An overlay with all components."""
    found: Json = {}
    for folder in (overlay, *COMPONENTS):
        build(folder, found)
    return found


def test_each_object_fits_its_schema_and_no_field_may_be_misspelt(objects: Json) -> None:
    for one in objects.values():
        schema = SCHEMAS["kinds"][f"{one['apiVersion']} {one['kind']}"]
        validator = jsonschema_rs.Draft7Validator(schema | {"definitions": SCHEMAS["definitions"]})
        validator.validate(one)
        assert unnoticed(one, one, validator) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_same(overlay: Path, objects: Json, tmp_path: Path) -> None:
    there, *components = (os.path.relpath(one, tmp_path) for one in (overlay, *COMPONENTS))
    file = yaml.safe_dump({"resources": [there], "components": components})
    (tmp_path / "kustomization.yaml").write_text(file)
    text = subprocess.check_output(["kubectl", "kustomize", tmp_path], text=True)
    # Two names say their content too, so that a change starts new pods.
    text = re.sub(r"\b(conserve-(settings|dashboard))-\w{10}\b", r"\1", text)
    built = [*yaml.safe_load_all(text.replace("\n  namespace: conserve\n", "\n"))]
    assert {f"{one['kind']} {one['metadata']['name']}": one for one in built} == objects


def test_pods_are_a_users_without_privileges_and_have_what_they_name(objects: Json) -> None:
    closed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    for pod in (one["spec"] for one in within(objects, "template")):
        user = pod["securityContext"]
        assert (user["runAsNonRoot"], user["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == closed | {"capabilities": {"drop": ["ALL"]}}
            mounted = {one["name"] for one in container["volumeMounts"]}
            assert {"tmp"} <= mounted <= {one["name"] for one in pod["volumes"]}
    assert all(f"PersistentVolumeClaim {one}" in objects for one in within(objects, "claimName"))
    secrets = {one["name"] for one in within(objects, "credentials", "secretKeyRef")}
    made = re.findall(r"create secret \w+ (\S+) ", (ROOT / "docs/guides/kubernetes.md").read_text())
    assert secrets | {*within(objects, "secretName")} == {*made}
    assert not any(one.startswith("Secret ") for one in objects)


def test_the_application_takes_keys_and_has_time_to_drain(overlay: Path, objects: Json) -> None:
    texts = [*within(objects, "settings.yaml"), *within(objects, "serveConfigV2")]
    (given,) = map(yaml.safe_load, texts or [(overlay / "app.yaml").read_text()])
    settings = load(given["applications"][0]["args"] if "applications" in given else given)
    assert (settings.host, settings.port, settings.unauthenticated) == ("0.0.0.0", 8000, False)
    assert settings.keys_file == "/etc/conserve/keys/keys.json"
    assert (settings.on_nodes(1).nodes == "one") == ("Deployment conserve" in objects)
    if "RayService conserve" in objects:
        by_hand, spec = overlay.with_name("raycluster"), objects["RayService conserve"]["spec"]
        cluster = spec["rayClusterConfig"]
        assert cluster == build(by_hand, {})["RayCluster conserve"]["spec"]
        assert [given] == read(by_hand / "app.yaml")
        assert f"ray=={cluster['rayVersion']} " in (ROOT / "requirements-gpu.txt").read_text()
    # The router's pod; its hook takes time, too.
    (pod,) = (one["spec"] for one in within(objects, "template") if "preStop" in str(one))
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_timeout_s + ENDS_WITHIN_S + 5


def test_only_the_routers_port_is_open(objects: Json) -> None:
    policies = [one["spec"] for one in objects.values() if one["kind"] == "NetworkPolicy"]
    assert all(one["podSelector"] == {"matchLabels": NAME} for one in policies)
    router, *others = (rule for one in policies for rule in one["ingress"])
    assert router == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    for rule in others:
        (who,) = within(rule["from"], *NAME)
        assert who == "conserve" or (who, *within(rule, "port")) == ("kuberay-operator", 8265)
    pods = [one["metadata"]["labels"].items() for one in within(objects, "template")]
    assert all(NAME.items() <= one for one in pods)
    for one in objects.values():
        if one["kind"] in ("Service", "PodDisruptionBudget"):
            wanted = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
            assert any(wanted.items() - {("ray.io/serve", "true")} <= pod for pod in pods)


def test_components_fit_the_alerts_the_service_and_the_settings(objects: Json) -> None:
    (alerts,) = read(ROOT / "deployments" / "monitoring" / "alerts.yaml")
    assert objects["PrometheusRule conserve"]["spec"] == alerts
    service, monitor = (objects[f"{kind} conserve"] for kind in ("Service", "ServiceMonitor"))
    assert service["metadata"]["labels"] == monitor["spec"]["selector"]["matchLabels"] == NAME
    assert monitor["spec"]["jobLabel"] in NAME
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    (said,) = within(objects["Ingress conserve"], "annotations")
    assert {one for key, one in said.items() if key.endswith("d-timeout")} == {"3600"}
    most = (Settings().max_body_bytes + Settings().media.bytes) / 2**20
    assert int(said["nginx.ingress.kubernetes.io/proxy-body-size"].removesuffix("m")) >= most
    assert {*within(objects["HTTPRoute conserve"], "request", "backendRequest")} == {"1h"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_and_scores_it_as_the_docs_say(tmp_path: Path) -> None:
    def analyzed(unit: str, command: str) -> str:
        file = tmp_path / "conserve.service"
        file.write_text(unit.replace("/opt/conserve/.venv/bin/conserve", "/bin/true"))
        return subprocess.getoutput(f"systemd-analyze {command} {file}")

    assert analyzed(UNIT, "verify") == ""
    assert "KillMod" in analyzed(UNIT.replace("KillMode", "KillMod"), "verify")
    (score,) = re.findall(r"level .*: ([\d.]+)", analyzed(UNIT, "security --offline=true"))
    assert f"**{score}**" in (ROOT / "docs/guides/services.md").read_text()


def test_the_unit_and_compose_drain_on_loopback_and_mount_what_is_there() -> None:
    (file,), (given,) = read(COMPOSE / "compose.yaml"), read(COMPOSE / "settings.yaml")
    services, settings = file["services"], load(given)
    validator = jsonschema_rs.Draft7Validator(SCHEMAS["compose"])
    validator.validate(file)
    for service in services.values():
        assert unnoticed(service, file, validator) == []
        assert (service["network_mode"], service.get("ports")) == ("host", None)
        sources = {one.partition(":")[0] for one in service["volumes"]}
        assert all((COMPOSE / one).exists() for one in sources - file["volumes"].keys())
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert settings.host == services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "password" not in (str(file) + UNIT).lower()
    graces = re.findall(r"TimeoutStopSec=(\d+)|stop_grace_period': '(\d+)s", UNIT + str(file))
    assert (
        min(int(one or other) for one, other in graces) >= settings.drain_timeout_s + ENDS_WITHIN_S
    )
    assert "KillMode=mixed\nKillSignal=SIGTERM\n" in UNIT
