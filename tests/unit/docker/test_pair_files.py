"""The Compose file and the manifest of prefill/decode pairs agree with the launcher, the router and each other."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hybrid.cluster.peers import Peers
from sglang_hybrid.engine.launch import disaggregation, early
from tests.unit.docker.test_cluster_files import require_scrapes, require_worker, value
from tests.unit.docker.test_docker_files import object_of, only, pins

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.pairs.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes-pairs.yaml").read_text()))
named = partial(object_of, OBJECTS)
ROLES = ("prefill", "decode")


def routed(arguments: list[str]) -> Peers:
    """What a router with these arguments stands before; raises ConfigError as it would."""
    urls = {role: [url for flag, url in pairwise(arguments) if flag == "--" + role] for role in ROLES}
    return Peers.named(urls["prefill"], urls["decode"])


def require_pair(prefill: list[str], decode: list[str]) -> dict[str, Any]:
    """Both sides have alike what they must, and the server that prefills tells of its states."""
    channel = require_worker(prefill)
    for flag in ("--model-path", "--page-size"):
        assert value(prefill, flag) == value(decode, flag)
    assert (value(prefill, "--disaggregation-mode"), value(decode, "--disaggregation-mode")) == ROLES
    assert "--hybrid-state-events" not in decode, "where no prompt is computed, none is resumed"
    return channel


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_compose_starts_a_router_before_a_pair(profile: str) -> None:
    mine = {name: each for name, each in COMPOSE["services"].items() if each["profiles"] == [profile]}
    (router,) = [name for name in mine if name.startswith("router")]
    servers = {role: [name for name in mine if name.startswith(role)] for role in ROLES}
    assert routed(mine[router]["command"]).urls == [f"http://{name}:30000" for role in ROLES for name in servers[role]]
    dockerfile = "docker/Dockerfile" if profile == "gpu" else "docker/Dockerfile.cpu"
    (entry,) = only(dockerfile, "ENTRYPOINT")
    assert mine[router]["entrypoint"] == [json.loads(entry)[0], "-m", "sglang_hybrid", "route"]
    for prefill, decode in zip(servers["prefill"], servers["decode"], strict=True):
        require_pair(mine[prefill]["command"], mine[decode]["command"])
        for name in (prefill, decode):
            assert "ports" not in mine[name], "transfers have no password"
            assert mine[name]["networks"] == ["pairs"]
    assert mine[router]["networks"] == ["pairs", "outside"]
    if profile == "gpu":
        devices = [
            mine[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
            for role in ROLES
            for name in servers[role]
        ]
        assert len({card for cards in devices for card in cards}) == sum(map(len, devices)), "a card has one server"


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_the_images_arguments_make_servers_that_others_reach(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is a wildcard there, so SGLang tells the container's address to the others."""
    monkeypatch.setattr(disaggregation, "missing", lambda _: None)
    monkeypatch.setattr(os, "environ", {})
    dockerfile = "docker/Dockerfile" if profile == "gpu" else "docker/Dockerfile.cpu"
    entry = json.loads(only(dockerfile, "ENTRYPOINT")[0])
    command = COMPOSE["services"]["prefill-0" if profile == "gpu" else "prefill-cpu-0"]["command"]
    given = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", each) for each in command]  # as Compose does
    seen = early.read([*entry[entry.index("--host") :], *given])
    disaggregation.prepare(seen, [])
    assert seen.disaggregation_mode == "prefill"
    assert disaggregation.ADDRESS not in os.environ
    assert os.environ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == str(disaggregation.TIMEOUT_S)


def test_the_cpu_image_has_what_pairs_hand_over_by() -> None:
    steps = " ".join(only("docker/Dockerfile.cpu", "RUN"))
    engine = "mooncake-transfer-engine-non-cuda"
    assert f"--no-deps {engine}=={pins()[engine]}" in steps
    assert "libibverbs1" in steps


def test_the_manifest_names_every_server_and_fences_all_of_them() -> None:
    workloads = {role: named("StatefulSet", f"sglang-hybrid-{role}") for role in ROLES}
    servers = {role: each["spec"]["template"]["spec"]["containers"][0] for role, each in workloads.items()}
    channel = require_pair(servers["prefill"]["args"], servers["decode"]["args"])
    ports = {role: {each["name"]: each["containerPort"] for each in servers[role]["ports"]} for role in ROLES}
    assert channel["endpoint"].endswith(f":{ports['prefill']['events']}")
    assert channel["replay_endpoint"].endswith(f":{ports['prefill']['replay']}")
    assert int(value(servers["prefill"]["args"], "--disaggregation-bootstrap-port")) == ports["prefill"]["bootstrap"]
    front = named("Deployment", "sglang-hybrid-router")
    (router,) = front["spec"]["template"]["spec"]["containers"]
    assert routed(router["args"]).urls == [
        f"http://sglang-hybrid-{role}-{at}.{workloads[role]['spec']['serviceName']}:30000"
        for role in ROLES
        for at in range(workloads[role]["spec"]["replicas"])
    ]
    labels = front["spec"]["template"]["metadata"]["labels"]
    assert named("Service", "sglang-hybrid")["spec"]["selector"] == labels
    for role, other in (ROLES, ROLES[::-1]):
        server, mine = servers[role], workloads[role]["spec"]["selector"]["matchLabels"]
        assert server["resources"]["limits"]["nvidia.com/gpu"] == int(value(server["args"], "--tp"))
        address = [each for each in server["env"] if each["name"] == disaggregation.ADDRESS]
        assert address[0]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert named("Service", workloads[role]["spec"]["serviceName"])["spec"]["selector"] == mine
        policy = named("NetworkPolicy", f"sglang-hybrid-{role}")["spec"]
        assert policy["podSelector"] == {"matchLabels": mine}
        asks, hands_over, scrapes = policy["ingress"]
        require_scrapes(workloads[role], scrapes)
        assert asks["from"] == [{"podSelector": {"matchLabels": labels}}]
        assert {each["port"] for each in asks["ports"]} == set(ports[role]) - {"bootstrap"}
        theirs = workloads[other]["spec"]["selector"]["matchLabels"]
        assert hands_over == {"from": [{"podSelector": {"matchLabels": theirs}}]}, "on every port, and from nobody else"
