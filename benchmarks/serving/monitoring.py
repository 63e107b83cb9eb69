"""Every expression of the dashboard and of the alert rules, asked of a real Prometheus that scrapes a real server.

    python -m benchmarks.serving.monitoring      # needs `prometheus` on the path: apt-get install prometheus

A small server with elastic memory gets a load that makes every series move: shared prefixes, declared boundaries, new
documents until both pools are short, long answers, retracted requests. tests/engine/test_monitoring.py does the same.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from benchmarks import provenance
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.prompts import words
from tests.engine.support import Client

DOCKER = provenance.ROOT / "docker"
NAME = "models/a model"
"""Labels take any text."""
FLAGS = (
    "--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.0032", "--page-size", "64",
    "--chunked-prefill-size", "512", "--max-running-requests", "6", "--enable-metrics",
    "--hybrid-memory-idle-s", "0.5", "--served-model-name", NAME,
)  # fmt: skip
ENVIRONMENT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "60"}
"""SGLang's own switch: every sixtieth pass of decoding gives a request's memory back."""

_SELECTOR = re.compile(r"\b(?:sglang:\w+|up)(?:\{[^}]*\})?")


def expressions() -> dict[str, str]:
    """Every expression by where it stands: panel and curve, or alert; every model is meant."""
    dashboard = json.loads((DOCKER / "grafana/dashboards/sglang-hybrid.json").read_text())
    found = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"].replace("$model", ".*")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }
    for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]:
        found |= {f"alert {rule['alert']}": rule["expr"] for rule in group["rules"]}
    return found


def selectors(expression: str) -> list[str]:
    """The series that an expression reads: a name, with its matchers if it has any."""
    return sorted(set(_SELECTOR.findall(re.sub(r"\$__\w+", "1m", expression))))


def load(client: Client, seed: int = 7) -> None:
    """About a minute of requests on two cores; every counter of the cache and of elastic memory grows."""
    rng = random.Random(seed)
    shared, declared = words(rng, 700), words(rng, 640)
    for number in range(3):
        client.generate(shared + words(rng, 90 + number))
        sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": {"cache_boundaries": [len(declared)]}}
        client.post("/generate", {"input_ids": declared + words(rng, 70), "sampling_params": sampling})
    documents = [words(rng, 1000) for _ in range(14)]  # more than there is room for: they take the memory of states
    for document in documents:
        client.generate(document, tokens=2)
    client.generate_all([words(rng, 90) for _ in range(40)], tokens=2, at_once=6)  # short prompts take it back
    for document in documents:  # some were given up, whatever the policy
        client.generate(document, tokens=2)
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    bodies = [{"input_ids": words(rng, 100), "stream": True, "sampling_params": sampling} for _ in range(6)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda body: client.post("/generate", body), bodies))


class Prometheus:
    """A Prometheus of this machine that scrapes one server every second, with the project's rules; a context manager.

    Raises FileNotFoundError where `prometheus` is not installed.
    """

    def __init__(self, target: str, folder: Path) -> None:
        config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of its HTTP interface."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]

    def series(self, expression: str) -> int:
        """Series of an instant query now."""
        return len(self.get("query", query=expression)["result"])

    def answers(self) -> bool:
        """Whether it has scraped the server."""
        try:
            return bool(self.get("query", query='up{job="sglang"} == 1')["result"])
        except OSError:
            return False

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


def version() -> str:
    """Of the installed Prometheus."""
    done = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).split()[2]


def main() -> None:
    provenance.no_arguments(__doc__)
    if shutil.which("prometheus") is None:
        raise SystemExit("prometheus is not installed: apt-get install prometheus")
    result = {
        **provenance.head("sglang", "prometheus_client", "sglang_hybrid"),
        "prometheus": version(),
        "flags": FLAGS,
    }
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        built = model.build(folder / "gdn", "gdn")
        with Server(built, FLAGS, log=folder / "log", environment=ENVIRONMENT) as server:
            server.wait_ready()
            with Prometheus(f"127.0.0.1:{server.port}", folder) as prometheus:
                while not prometheus.answers():
                    time.sleep(0.5)
                load(Client(server))
                time.sleep(5)
                result["expressions"] = {
                    place: {
                        "series": prometheus.series(expression),
                        "reads": {each: prometheus.series(each) for each in selectors(expression)},
                    }
                    for place, expression in expressions().items()
                }
    print(provenance.write("serving", "monitoring", result))
    silent = [
        place
        for place, found in result["expressions"].items()
        if not all(found["reads"].values()) or not (found["series"] or place.startswith("alert"))
    ]
    raise SystemExit(f"these see nothing: {silent}" if silent else 0)


if __name__ == "__main__":
    main()
