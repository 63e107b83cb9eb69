"""The Compose file and the manifest of a cluster agree with the router, the launcher and each other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hybrid.cluster.worker import checked
from tests.unit.docker.test_docker_files import object_of, only

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.cluster.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes-cluster.yaml").read_text()))
named = partial(object_of, OBJECTS)


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def require_worker(arguments: list[str]) -> dict[str, Any]:
    assert (value(arguments, "--page-size"), value(arguments, "--hybrid-state-events")) == ("64", "published")
    channel: dict[str, Any] = json.loads(value(arguments, "--kv-events-config"))
    assert channel["publisher"] == "zmq"
    assert all(channel[key].startswith("tcp://*:") for key in ("endpoint", "replay_endpoint")), "it listens"
    return channel


def require_scrapes(pods: dict[str, Any], rule: dict[str, Any]) -> None:
    """What the annotations of pods ask for gets through their policy, and nothing else by it."""
    asked = pods["spec"]["template"]["metadata"]["annotations"]
    (server,) = pods["spec"]["template"]["spec"]["containers"]
    (http,) = [each for each in server["ports"] if str(each["containerPort"]) == asked["prometheus.io/port"]]
    assert rule == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "ports": [{"protocol": "TCP", "port": http["name"]}],
    }


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_compose_starts_a_router_before_its_servers(profile: str) -> None:
    mine = {name: each for name, each in COMPOSE["services"].items() if each["profiles"] == [profile]}
    (router,) = [name for name in mine if name.startswith("router")]
    servers = [name for name in mine if name != router]
    arguments = mine[router]["command"]
    assert checked(arguments[3::2]) == [f"http://{name}:30000" for name in servers]
    dockerfile = "docker/Dockerfile" if profile == "gpu" else "docker/Dockerfile.cpu"
    (entry,) = only(dockerfile, "ENTRYPOINT")
    assert mine[router]["entrypoint"] == [json.loads(entry)[0], "-m", "sglang_hybrid", "route"]
    for name in servers:
        require_worker(mine[name]["command"])
        assert "ports" not in mine[name], "events have no password"
    if profile == "gpu":
        devices = [mine[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in servers]
        assert len({card for cards in devices for card in cards}) == sum(map(len, devices)), "a card has one server"


def test_the_manifest_names_every_worker_and_fences_their_events() -> None:
    workers, router = named("StatefulSet", "sglang-hybrid-worker"), named("Deployment", "sglang-hybrid-router")
    (server,) = workers["spec"]["template"]["spec"]["containers"]
    channel = require_worker(server["args"])
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert channel["endpoint"].endswith(f":{ports['events']}")
    assert channel["replay_endpoint"].endswith(f":{ports['replay']}")
    assert server["resources"]["limits"]["nvidia.com/gpu"] == int(value(server["args"], "--tp"))
    (front,) = router["spec"]["template"]["spec"]["containers"]
    urls = checked([each for each in front["args"] if each.startswith("http")])
    service = workers["spec"]["serviceName"]
    assert urls == [
        f"http://sglang-hybrid-worker-{at}.{service}:{ports['http']}" for at in range(workers["spec"]["replicas"])
    ]
    assert named("Service", service)["spec"]["selector"] == workers["spec"]["selector"]["matchLabels"]
    labels = router["spec"]["template"]["metadata"]["labels"]
    assert named("Service", "sglang-hybrid")["spec"]["selector"] == labels
    rule, scrapes = named("NetworkPolicy", "sglang-hybrid-worker")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert {each["port"] for each in rule["ports"]} == set(ports)
    require_scrapes(workers, scrapes)
