"""The container files agree with the repository and with each other."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCKERFILES = ["docker/Dockerfile", "docker/Dockerfile.cpu"]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())


def load_check() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("docker_check", str(ROOT / "docker/check"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


CHECK = load_check()


def instructions(name: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = CHECK.instructions((ROOT / name).read_text())
    return found


def object_of(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of a Kubernetes manifest that is of `kind` and called `name`."""
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def only(name: str, keyword: str) -> list[str]:
    return [rest for word, rest in instructions(name) if word == keyword]


def sources(name: str) -> Iterator[str]:
    for rest in only(name, "COPY"):
        yield from rest.split()[:-1]


def is_sent(path: str) -> bool:
    """Whether the allow-list in .dockerignore lets a path into the build context."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(path == entry or path.startswith(entry + "/") for entry in allowed)


def pins() -> dict[str, str]:
    """Exact versions in pyproject.toml and scripts/setup, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    text = "\n".join([*extras, (ROOT / "scripts/setup").read_text()])
    return dict(re.findall(r"\b([a-z][a-z0-9-]*)==([0-9][0-9a-z.]*)", text))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_copied_path_exists_and_is_sent_to_the_engine(name: str) -> None:
    copied = list(sources(name))
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert is_sent(path), path


def test_build_context_is_an_allow_list() -> None:
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert not is_sent("tests")
    assert not is_sent("docker/compose.yaml")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_hold_what_the_wheel_is_built_from(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | {package.split("/")[0] for package in packages} <= set(sources(name))


def test_versions_are_those_of_the_project() -> None:
    gpu = (ROOT / "docker/Dockerfile").read_text()
    assert only("docker/Dockerfile", "ARG")[0] == f"SGLANG_VERSION={pins()['sglang']}"
    assert "FROM lmsysorg/sglang:v${SGLANG_VERSION}" in gpu
    base = only("docker/Dockerfile.cpu", "FROM")[0]
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", base)
    assert version is not None, base
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert requires == f">={version[1]}"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_unprivileged_and_are_watched(name: str) -> None:
    users = only(name, "USER")
    assert users[-1].isdigit()
    assert users[-1] != "0"
    (health,) = only(name, "HEALTHCHECK")
    command = json.loads(health[health.index("[") :])
    assert command[1] in list(sources(name))
    entrypoint = json.loads(only(name, "ENTRYPOINT")[-1])
    assert "sglang_hybrid.launch_server" in entrypoint
    assert only(name, "EXPOSE") == [entrypoint[entrypoint.index("--port") + 1]]
    assert {"--enable-metrics", "--enable-cache-report"} <= set(entrypoint)


def environment_of(name: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in only(name, "ENV") for pair in shlex.split(rest))


def test_models_and_compiled_kernels_are_kept_in_the_volume() -> None:
    """SGLANG_CACHE_DIR is where SGLang has DeepGEMM, Inductor and its own kernels compiled, for minutes."""
    (volume,) = only("docker/Dockerfile", "VOLUME")
    environment = environment_of("docker/Dockerfile")
    assert {"HF_HOME", "SGLANG_CACHE_DIR"} <= set(environment)
    assert all(path.startswith(f"{volume}/") for path in environment.values())


def test_cpu_image_serves_the_model_it_builds() -> None:
    environment = environment_of("docker/Dockerfile.cpu")
    served = json.loads(only("docker/Dockerfile.cpu", "CMD")[-1])
    assert served[served.index("--model-path") + 1] == environment["SGLANG_HYBRID_MODELS"] + "/demo"
    entrypoint = json.loads(only("docker/Dockerfile.cpu", "ENTRYPOINT")[-1])
    assert entrypoint[0] == environment["SGLANG_HYBRID_VENV"] + "/bin/python"


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_each_profile_has_one_server_a_collector_and_a_dashboard(profile: str) -> None:
    names = {name for name, service in COMPOSE["services"].items() if profile in service["profiles"]}
    servers = {name for name in names if name.startswith("server")}
    assert len(servers) == 1
    assert names - servers == {"prometheus", "grafana"}
    (server,) = servers
    assert "server" in COMPOSE["services"][server]["networks"]["default"]["aliases"]


def services() -> list[tuple[str, dict[str, Any]]]:
    return list(COMPOSE["services"].items())


def test_mounted_and_built_files_exist_and_volumes_are_declared() -> None:
    for name, service in services():
        if "build" in service:
            context = (ROOT / "docker" / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).exists(), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / "docker" / source).exists(), volume
            else:
                assert source in COMPOSE["volumes"], volume


def test_ports_are_open_to_this_machine_only_and_images_are_pinned() -> None:
    for name, service in services():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        tag = service["image"].partition(":")[2]
        assert tag not in ("", "latest"), name


def test_prometheus_scrapes_the_server_and_grafana_reads_prometheus() -> None:
    scraped = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"]
    port = only("docker/Dockerfile", "EXPOSE")[0]
    assert scraped[0]["static_configs"][0]["targets"] == [f"server:{port}"]
    source = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/sglang-hybrid.json").read_text())
    used = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    assert used == {source["datasources"][0]["uid"]}


def test_alert_rules_are_where_prometheus_looks_for_them() -> None:
    rules = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["rule_files"]
    mounted = COMPOSE["services"]["prometheus"]["volumes"]
    assert rules
    assert all(f"./{name}:/etc/prometheus/{name}:ro" in mounted for name in rules)


def test_panels_have_a_place_of_their_own() -> None:
    panels = json.loads((ROOT / "docker/grafana/dashboards/sglang-hybrid.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_dashboards_are_mounted_where_they_are_looked_for() -> None:
    provider = yaml.safe_load((ROOT / "docker/grafana/provisioning/dashboards/files.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    grafana = COMPOSE["services"]["grafana"]
    assert f"./grafana/dashboards:{path}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{path}/sglang-hybrid.json"


def test_dockerfile_instructions_are_read_like_an_engine_reads_them() -> None:
    text = '# a comment\nFROM a\nRUN one \\\n # inside\n && two\n\nCMD ["x"]\n'
    assert [(word, " ".join(rest.split())) for word, rest in CHECK.instructions(text)] == [
        ("FROM", "a"),
        ("RUN", "one && two"),
        ("CMD", '["x"]'),
    ]
