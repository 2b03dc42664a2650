"""A tier that no node offers is reported at start, with what the cluster has."""

from typing import Any

import pytest

from conserve.settings import SettingsError, load
from deployments import tier_nodes


class Cluster:
    """What Ray says of one, as far as it is asked; a node may join after some looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = [node("10.0.0.1", {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0})]
        self.joins: dict[int, dict[str, Any]] = {}
        self.looks = 0
        self.asked: list[Any] = []
        monkeypatch.setattr(tier_nodes, "_LOOK_S", 0.01)
        monkeypatch.setattr(tier_nodes.ray, "nodes", self.look)
        monkeypatch.setattr(tier_nodes, "request_resources", self.request)

    def look(self) -> list[dict[str, Any]]:
        if self.looks in self.joins:
            self.nodes.append(self.joins[self.looks])
        self.looks += 1
        return self.nodes

    def request(self, bundles: Any, bundle_label_selectors: Any = None) -> None:
        self.asked.append((bundles, bundle_label_selectors))


def node(name: str, resources: dict[str, float], **labels: str) -> dict[str, Any]:
    return {"NodeManagerAddress": name, "Alive": True, "Resources": resources, "Labels": labels}


SETTINGS = load(
    {
        "tiers": {"frugal": {"accelerator_type": "A40", "labels": {"zone": "b"}}},
        "decoders": {"tier": "frugal"},
    }
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_it_is_refused_at_once_where_no_node_will_join(cluster: Cluster) -> None:
    with pytest.raises(SettingsError) as caught:
        tier_nodes.wait_for_nodes(SETTINGS, True, 0.0)
    said = str(caught.value)
    assert "decoders.tier: no node offers 'frugal' (accelerator type A40, label zone=b)" in said
    assert "node 10.0.0.1: 8 CPU; 4 GPU; accelerator type H100" in said
    assert cluster.asked == []


def test_a_node_that_joins_is_waited_for_and_asked_for(cluster: Cluster) -> None:
    cluster.joins[3] = node("10.0.0.2", {"GPU": 2.0, "accelerator_type:A40": 1.0}, zone="b")
    tier_nodes.wait_for_nodes(SETTINGS, True, 60.0)
    (wanted, labels), (nothing, _) = cluster.asked
    assert {"CPU": 1, "GPU": 1, "accelerator_type:A40": 0.001} in wanted
    assert {"zone": "b"} in labels
    assert nothing == []


def test_the_wait_has_a_bound(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match="Start such a node"):
        tier_nodes.wait_for_nodes(SETTINGS, True, 0.5)
    assert cluster.looks > 2
    (said,) = caplog.messages  # At once, and once.
    assert "no node offers 'frugal'" in said
    assert "accelerator type H100" in said
    # What was asked for is withdrawn, or nodes would come, and stay, for nobody.
    assert cluster.asked[-1] == ([], None)


def test_too_few_gpus_are_refused_with_the_sum(cluster: Cluster) -> None:
    """Serve would wait for them for ever."""
    with pytest.raises(SettingsError) as caught:
        tier_nodes.wait_for_nodes(load({"decoders": 4}), True, 0.0)
    said = str(caught.value)
    assert "gpus: 1 prefiller x 1 + 4 decoders x 1 = 5 are asked for, and Ray has 4" in said
    assert "gpus=4" in said
    tier_nodes.wait_for_nodes(load({"decoders": 4}), False, 0.0)  # On CPUs nobody wants any.
    assert cluster.asked == []
