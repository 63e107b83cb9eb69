"""deploy/: the unit and the manifest agree with the images, the launcher and the settings."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.docker.test_docker_files import only, pins

ROOT = Path(__file__).parents[3]
OBJECTS = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())}
POD = OBJECTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
UNIT = configparser.RawConfigParser(strict=False)
UNIT.optionxform = str  # type: ignore[assignment, method-assign]
UNIT.read_string((ROOT / "deploy/sglang-hybrid.service").read_text().replace("\\\n", " "))

HEALTH_CHECK_S = 20
"""How long SGLang gives the token that /health computes (SGLANG_HEALTH_CHECK_TIMEOUT)."""


def test_there_is_a_card_for_every_rank() -> None:
    arguments = CONTAINER["args"]
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(arguments[arguments.index("--tp") + 1])


def test_ports_and_labels_agree() -> None:
    (port,) = CONTAINER["ports"]
    assert [str(port["containerPort"])] == only("docker/Dockerfile", "EXPOSE")
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    (served,) = OBJECTS["Service"]["spec"]["ports"]
    assert served["targetPort"] == port["name"]
    labels = POD["metadata"]["labels"]
    assert labels == OBJECTS["Service"]["spec"]["selector"]
    assert labels == OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"]


def test_only_http_gets_in() -> None:
    policy = OBJECTS["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == POD["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": CONTAINER["ports"][0]["name"]}]}]


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_wait_for_the_token(name: str) -> None:
    probe = CONTAINER[name]
    assert probe["httpGet"] == {"path": "/health", "port": CONTAINER["ports"][0]["name"]}
    assert probe["timeoutSeconds"] > HEALTH_CHECK_S


def test_a_slow_start_is_no_reason_to_kill_and_a_stop_has_time() -> None:
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert CONTAINER["livenessProbe"]["failureThreshold"] > CONTAINER["readinessProbe"]["failureThreshold"]
    pause = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] >= pause + 60


def test_it_runs_as_the_image_does_and_mounts_what_it_names() -> None:
    assert POD["spec"]["securityContext"]["runAsUser"] == int(only("docker/Dockerfile", "USER")[-1])
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts) == set(volumes)
    assert [mounts["cache"]] == only("docker/Dockerfile", "VOLUME")
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def service(key: str) -> Any:
    return UNIT["Service"][key]


def test_the_unit_gives_a_stop_time_and_does_not_repeat_bad_settings() -> None:
    assert service("KillSignal") == "SIGTERM"
    assert int(service("TimeoutStopSec")) >= 60
    assert (service("Restart"), service("RestartPreventExitStatus")) == ("on-failure", "2")
    state = f"/var/lib/{service('StateDirectory')}"
    written = dict(re.findall(r"(\w+)=(\S+)", service("Environment")))
    assert written["HOME"] == state, "a system user has none, and FlashInfer and SGLang write below it"
    assert all(path == state or path.startswith(f"{state}/") for path in written.values()), "ProtectSystem=strict"


def test_the_page_installs_the_versions_of_the_project() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    for package, version in re.findall(r"\b([a-z]+)==([\d.]+\d)", page):
        assert pins()[package] == version
    extras = set(re.findall(r"\.whl\)\[(\w+)\]", page))
    assert extras == {"cuda", "cpu"}
