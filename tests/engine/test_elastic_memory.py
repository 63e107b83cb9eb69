"""KV and states over one small budget: real servers, memory that is short all the time, and memory that fails."""

from __future__ import annotations

import os
import random
import re
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sglang_hybrid import cli
from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine.series import MISS_TOKENS
from sglang_hybrid.prefix.misses import REASONS
from tests.engine.prompts import words
from tests.engine.smaps import unforked_bytes
from tests.engine.support import PATIENCE_S, Client, Prompt, Reference, elastic_metric, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = (
    "--hybrid-memory", "elastic", "--chunked-prefill-size", "512", "--max-running-requests", "6", "--enable-metrics",
    "--hybrid-memory-idle-s", "0.5", "--hybrid-log-interval-s", "1",
)  # fmt: skip
RANKS = ("ranks", "latent_ranks")
VARIANTS = {  # model and flags: each way a model can differ is met once
    "extra_buffer": ("gdn", "--page-size", "64", "--hybrid-cpu-memory-gb", "0.0032"),
    "no_buffer": ("mamba2", "--mamba-radix-cache-strategy", "no_buffer", "--hybrid-cpu-memory-gb", "0.012"),
    RANKS[0]: ("gdn", "--tp-size", "2", "--hybrid-cpu-memory-gb", "0.0016"),
    "latent": ("kda", "--page-size", "64", "--hybrid-cpu-memory-gb", "0.0032"),
    "latent_no_buffer": ("kda", "--mamba-radix-cache-strategy", "no_buffer", "--hybrid-cpu-memory-gb", "0.0024"),
    "head": ("mtp", "--speculative-algorithm", "NEXTN", "--page-size", "64", "--hybrid-cpu-memory-gb", "0.0055"),
    "n_grams": (
        "mamba2", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4",
        "--speculative-ngram-capacity", "100000", "--mamba-radix-cache-strategy", "no_buffer",
        "--hybrid-cpu-memory-gb", "0.016",
    ),
    RANKS[1]: ("kda", "--page-size", "16", "--tp-size", "2", "--hybrid-cpu-memory-gb", "0.0016"),
}  # fmt: skip


class Elastic(Client):
    """A client of a server whose memory can be made to fail, and that is asked what it uses."""

    def __init__(self, server: Server, faults: Path, preset: str) -> None:
        super().__init__(server)
        self.faults = faults
        self.preset = preset

    @contextmanager
    def failing(self, fault: str, rank: str = "") -> Iterator[None]:
        """Memory fails in the way of `fault`, on one `rank` if there are several; see faults/sitecustomize.py."""
        (self.faults / fault).write_text(rank)
        try:
            yield
        finally:
            (self.faults / fault).unlink()

    def metric(self, name: str, kind: str = "") -> float:
        return elastic_metric(self, name, kind)

    def used(self) -> float:
        return self.metric("granules_used", "kv") + self.metric("granules_used", "state")

    def is_empty(self) -> bool:
        """Whether all memory but that of the padding slots is back with the system."""
        return self.metric("granules_resident") == self.metric("granules_pinned")

    def schedulers(self) -> list[psutil.Process]:
        """By rank; the metrics are those of the first."""
        family = psutil.Process(self.server.process.pid).children(recursive=True)
        return sorted((each for each in family if "scheduler" in each.name()), key=lambda process: process.name())

    def scheduler(self) -> psutil.Process:
        return self.schedulers()[0]

    def has_returned_all(self) -> bool:
        """The same of every rank: each gives idle memory back by its own clock, and would use it before it waits."""
        pinned = self.metric("granules_pinned") * self.metric("granule_bytes")
        return self.is_empty() and all(unforked_bytes(each.pid) == pinned for each in self.schedulers())

    def agrees(self) -> bool:
        """Whether exactly the memory that the account calls resident is, by the system's word."""
        account = self.metric("granules_resident") * self.metric("granule_bytes")
        return unforked_bytes(self.scheduler().pid) == account


@pytest.fixture(scope="module", params=list(VARIANTS))
def client(
    request: pytest.FixtureRequest, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Elastic]:
    faults = tmp_path_factory.mktemp("faults")
    path = [str(Path(__file__).parent / "faults"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "ELASTIC_FAULTS": str(faults),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    log = faults.parent / f"{request.param}.log"
    preset, *flags = VARIANTS[request.param]
    if request.param in RANKS:
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"  # the cores of each rank
    with Server(models(preset), [*FLAGS, *flags], log=log, environment=environment) as server:
        server.wait_ready(PATIENCE_S)
        yield Elastic(server, faults, preset)
        text = server.log.read_text()
        assert "memory: state" in text, "the log line"
        assert not re.search("Traceback|leak detected|does not add up", text)


def shifting(seed: int) -> list[Prompt]:
    """Short chats, long documents, short chats; together many times the budget."""
    rng = random.Random(seed)
    chats = [words(rng, 300) for _ in range(3)]
    short = [rng.choice(chats)[: rng.randint(20, 300)] + words(rng, rng.randint(1, 60)) for _ in range(40)]
    long = [words(rng, rng.randint(1200, 2200)) for _ in range(6)]
    return [*short[:20], *long, *short[20:]]


def test_shifting_load_changes_no_token_and_leaves_no_page(
    client: Elastic, serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    reference, batch = references(client.preset), shifting(seed=41)
    static = serve(client.preset, "--chunked-prefill-size", "128")
    answers = client.generate_all(batch, tokens=16, at_once=8)
    for prompt, (output, _), (other, _) in zip(batch, answers, static.generate_all(batch, tokens=16), strict=True):
        reference.assert_greedy(prompt, output, "elastic")
        reference.assert_same(prompt, output, other, "elastic and static")
    assert sum(hit for _, hit in answers) > 0
    assert client.metric("granules_used_max") > 0.7 * client.metric("granules_budget")
    client.flush()
    assert eventually(client.is_empty), "a column of KV and one of states are pinned"
    assert client.used() == client.metric("granules_pinned")
    assert client.metric("failures", "map") == 0
    missed = [line for line in client.get("/metrics").splitlines() if line.startswith(MISS_TOKENS.name + "{")]
    assert len(missed) == len(REASONS), "one rank publishes, so that a sum counts nothing twice"
    assert all('tp_rank="0"' in line for line in missed)
    assert cli.main(["doctor", "--url", client.server.url]) == 0
    assert cli.main(["doctor", "--url", static.server.url]) == 2, "it has no --enable-metrics"


def test_a_request_as_large_as_the_budget_finds_room_in_a_full_cache(
    client: Elastic, references: Callable[[str], Reference]
) -> None:
    rng = random.Random(46)
    client.generate_all([words(rng, 90) for _ in range(40)], tokens=2, at_once=6)  # states and KV everywhere
    found = re.search(r"max_total_num_tokens=(\d+)", client.server.log.read_text())
    assert found is not None
    prompt = words(rng, min(int(found[1]) - 256, 7000))
    output, _ = client.generate(prompt, tokens=4)
    assert len(output) == 4
    references(client.preset).assert_greedy(prompt, output, "as large as the budget")


def test_memory_of_the_process_follows_the_account(client: Elastic) -> None:
    rng, budget = random.Random(42), client.metric("granules_budget")
    client.generate_all([words(rng, 700) for _ in range(14)], tokens=2, at_once=4)
    assert eventually(lambda: client.metric("granules_resident") > 0.5 * budget)
    assert eventually(client.agrees)
    client.flush()
    assert eventually(client.is_empty)
    assert eventually(client.agrees)


@pytest.mark.parametrize("fault", ["taken", "map"])
def test_a_request_waits_while_memory_fails(
    client: Elastic, references: Callable[[str], Reference], fault: str
) -> None:
    client.flush()
    assert eventually(client.has_returned_all)
    waits, prompt, answers = max(client.metric("waits"), waited(client)), words(random.Random(43), 900), []
    asking = threading.Thread(target=lambda: answers.append(client.generate(prompt)))
    with client.failing(fault, rank="1" if fault == "taken" else "0"):  # the metrics are those of rank 0
        asking.start()
        if fault == "taken":
            assert eventually(lambda: waited(client) > waits)
            assert answers == []
        else:  # half a grant is rolled back, again and again, until the mappings work
            assert eventually(lambda: bool(answers))
    asking.join()
    references(client.preset).assert_greedy(prompt, answers[0][0], fault)
    assert fault == "taken" or eventually(lambda: client.metric("failures", "map") > 0)


def test_while_a_chunk_waits_nobody_else_is_admitted(client: Elastic, references: Callable[[str], Reference]) -> None:
    """SGLang counts a pass without the chunk as one with it, and then loses the first token of the answer."""
    client.flush()
    rng, waits = random.Random(47), max(client.metric("waits"), waited(client))  # the log comes later
    answers_to_long: list[tuple[Prompt, int]] = []
    answers: list[tuple[Prompt, int]] = []
    found = re.search(r"max_total_num_tokens=(\d+)", client.server.log.read_text())
    assert found is not None
    long = words(rng, min(int(found[1]) - 600, 6000))
    asking = threading.Thread(target=lambda: answers_to_long.append(client.generate(long)))
    short = [words(rng, 40) for _ in range(3)]
    others = threading.Thread(target=lambda: answers.extend(client.generate_all(short, at_once=3)))
    passes = client.batches("Prefill")
    with client.failing("little"):
        asking.start()
        assert eventually(lambda: waited(client) > waits)
        assert client.batches("Prefill") == passes + 1, "the second chunk waits, the first ran"
        others.start()
        time.sleep(1)  # long enough for them to be admitted, if they were
    asking.join()
    others.join()
    for prompt, (output, _) in zip([long, *short], [*answers_to_long, *answers], strict=True):
        references(client.preset).assert_greedy(prompt, output, "while a chunk waited")


def waited(client: Elastic) -> float:
    """Waits by the log: a scheduler that only waits runs no pass that would export metrics."""
    return max((float(n) for n in re.findall(r"(\d+) waits", client.server.log.read_text())), default=0.0)


def test_memory_that_fails_in_mid_decode_ends_one_request_at_most(
    client: Elastic, references: Callable[[str], Reference]
) -> None:
    client.flush()
    prompt, outcome = words(random.Random(44), 100), []

    def ask() -> None:
        try:
            outcome.append(client.generate(prompt, tokens=700)[0])
        except urllib.error.HTTPError as error:
            outcome.append(error.code)

    decoded = client.batches("Decode")
    asking = threading.Thread(target=ask)
    asking.start()
    assert eventually(lambda: client.batches("Decode") > decoded, every_s=0.01)
    with client.failing("none", rank="1"):  # what was made ahead would carry it through if only creation failed
        asking.join(timeout=8)
    asking.join()
    if outcome[0] != 500:
        references(client.preset).assert_greedy(prompt, outcome[0], "in mid-decode")
    output, _ = client.generate(prompt)
    references(client.preset).assert_greedy(prompt, output, "afterwards")


def test_releasing_memory_under_load_takes_nothing_from_who_runs(
    client: Elastic, references: Callable[[str], Reference]
) -> None:
    rng = random.Random(45)
    kept = words(rng, 500)
    client.generate(kept)
    prompts, answers = [words(rng, 200) for _ in range(3)], []
    load = threading.Thread(target=lambda: answers.extend(client.generate_all(prompts, tokens=120, at_once=3)))
    load.start()
    for _ in range(3):
        time.sleep(0.4)
        client.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    load.join()
    for prompt, (output, _) in zip(prompts, answers, strict=True):
        references(client.preset).assert_greedy(prompt, output, "released under load")
    assert client.generate(kept)[1] == 0, "what nobody read is gone"
    client.post("/release_memory_occupation", {})
    client.post("/resume_memory_occupation", {})
    assert eventually(client.is_empty)
