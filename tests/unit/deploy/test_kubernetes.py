"""The manifests of deploy/kubernetes fit their schemas, the settings and docs/security.md."""

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from conserve.settings import Settings, load
from tests.checkout import ROOT
from tests.unit.deploy.manifests import DRAINED_WITHIN_S, Json, build, read, refused, within

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
DOCS = (ROOT / "docs" / "kubernetes.md").read_text()
NAME = {"app.kubernetes.io/name": "conserve"}
OPERATOR = {"namespaceSelector": {}, "podSelector": {
    "matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}  # fmt: skip
# Maps whose names are an operator's.
FREE = ("annotations data labels limits matchLabels nodeSelector rayStartParams requests "
        "selector").split()  # fmt: skip


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(overlay: str, tmp_path: Path) -> Path:
    """An operator's kustomization, as docs/kubernetes.md shows it: an overlay, all components."""
    (text,) = re.findall(r"```yaml\n(.*?kind: Kustomization.*?)```", DOCS, re.DOTALL)
    there = os.path.relpath(KUBERNETES, tmp_path)
    file = yaml.safe_load(text) | {"resources": [f"{there}/overlays/{overlay}"]}
    file["components"] = [f"{there}/components/{name}" for name in COMPONENTS]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(file))
    return tmp_path


@pytest.fixture
def objects(folder: Path) -> list[Json]:
    return build(folder)


def of(objects: list[Json], kind: str) -> list[Json]:
    return [one for one in objects if one["kind"] == kind]


@pytest.fixture
def settings(overlay: str, objects: list[Json]) -> Settings:
    """The settings of the application, whichever way it gets them."""
    for one in of(objects, "ConfigMap"):
        if "settings.yaml" in one["data"]:
            return load(yaml.safe_load(one["data"]["settings.yaml"]))
    services = [one["spec"]["serveConfigV2"] for one in of(objects, "RayService")]
    text = services[0] if services else (KUBERNETES / "overlays" / overlay / "app.yaml").read_text()
    return load(yaml.safe_load(text)["applications"][0]["args"])


def test_each_object_fits_its_schema(objects: list[Json]) -> None:
    assert [(one["kind"], refused(one)) for one in objects if refused(one)] == []
    assert len({(one["kind"], one["metadata"]["name"]) for one in objects}) == len(objects)
    assert not of(objects, "Secret")


def test_a_misspelt_field_is_found(objects: list[Json]) -> None:
    def missed(one: Any, root: Json) -> list[str]:
        found = []
        for key, value in [*(one.items() if isinstance(one, dict) else enumerate(one))]:
            if isinstance(one, dict) and key not in ("apiVersion", "kind"):
                one[f"{key}x"] = one.pop(key)
                found += [] if refused(root) else [key]
                one[key] = one.pop(f"{key}x")
            if isinstance(value, dict | list) and key not in FREE:
                found += missed(value, root)
        return found

    kinds = {one["kind"]: one for one in copy.deepcopy(objects)}
    assert {kind: missed(one, one) for kind, one in kinds.items()} == {kind: [] for kind in kinds}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_same(folder: Path, objects: list[Json]) -> None:
    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # This name says its content too, so that a change starts new pods.
    there = yaml.safe_load_all(re.sub(r"(name: conserve-settings)-\w{10}\b", r"\1", text))

    def by_id(found: Any) -> Json:
        return {f"{one['kind']} {one['metadata']['name']}": one for one in found}

    assert by_id(there) == by_id(objects)


def test_pods_are_a_users_without_privileges(objects: list[Json]) -> None:
    claims = {one["metadata"]["name"] for one in of(objects, "PersistentVolumeClaim")}
    assert {one["claimName"] for one in within(objects, "claimName")} <= claims
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
            assert {*mounts.values()} <= {one["name"] for one in pod["volumes"]}
            assert "/tmp" in mounts


def test_secrets_are_references_that_the_docs_explain(objects: list[Json]) -> None:
    named = {one["secretName"] for one in within(objects, "secretName")}
    for field in ("secretKeyRef", "credentials"):
        named |= {one[field]["name"] for one in within(objects, field)}
    assert {"conserve-keys", "conserve-hub", "conserve-prometheus"} <= named
    assert all(re.search(rf"kubectl .*create secret \w+ {name} ", DOCS) for name in named)


def test_the_application_is_open_to_keys_and_has_time_to_drain(
    overlay: str, objects: list[Json], settings: Settings
) -> None:
    assert (settings.host, settings.port, settings.unauthenticated) == ("0.0.0.0", 8000, False)
    assert settings.keys_file == "/etc/conserve/keys/keys.json"
    assert settings.on_nodes(1).nodes == ("one" if "one-node" in overlay else "several")
    # Where the router is.
    (pod,) = (one for one in within(objects, "containers") if "lifecycle" in str(one))
    assert pod["terminationGracePeriodSeconds"] >= 5 + settings.drain_timeout_s + DRAINED_WITHIN_S
    mounts = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert {"/etc/conserve/keys", "/models", "/dev/shm"} <= mounts


def test_only_the_routers_port_is_open(objects: list[Json]) -> None:
    own = [{"podSelector": {"matchLabels": NAME}}]
    policies = {one["metadata"]["name"]: one["spec"] for one in of(objects, "NetworkPolicy")}
    router, *others = [rule for one in policies.values() for rule in one["ingress"]]
    assert router == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert all(one["podSelector"] == {"matchLabels": NAME} for one in policies.values())
    if others:
        assert others[0] == {"from": own}
        assert others[1:] == [{"ports": [{"port": 8265, "protocol": "TCP"}], "from": [OPERATOR]}]
    labels = [one["template"]["metadata"]["labels"].items() for one in within(objects, "template")]
    assert all(NAME.items() <= one for one in labels)
    for one in (*of(objects, "Service"), *of(objects, "PodDisruptionBudget")):
        selector = one["spec"]["selector"]
        wanted = selector.get("matchLabels", selector).items() - {("ray.io/serve", "true")}
        assert any(wanted <= one for one in labels)


def test_prometheus_gets_the_alerts_and_the_job_that_they_ask_for(objects: list[Json]) -> None:
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


def test_a_rayservice_has_the_cluster_of_a_raycluster() -> None:
    of_cluster, of_service = (
        build(KUBERNETES / "overlays" / name)[-1]["spec"] for name in ("raycluster", "rayservice")
    )
    assert of_service["rayClusterConfig"] == of_cluster
    pins = (ROOT / "requirements-gpu.txt").read_text()
    assert re.search(rf"^ray==({of_cluster['rayVersion']})$", pins, re.MULTILINE)
    (file,) = read(KUBERNETES / "overlays" / "raycluster" / "app.yaml")
    assert yaml.safe_load(of_service["serveConfigV2"]) == file
