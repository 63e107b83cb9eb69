"""Weights that a trainer broadcasts to a server that is busy: nothing of the old ones serves a prompt afterwards."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from tests.engine.support import PATIENCE_S, Client, Prompt

TRAINER = """
import sys, torch
from safetensors.torch import load_file
from sglang.srt.utils.common import init_custom_process_group

address, path = sys.argv[1:]
group = init_custom_process_group(backend="gloo", init_method=address, world_size=2, rank=0, group_name="trainer")
weights = load_file(path)
print("joined", flush=True)
for names in sys.stdin:
    for name in names.split():
        torch.distributed.broadcast(weights[name].contiguous(), src=0, group=group)
    print("sent", flush=True)
"""


@contextmanager
def trainer(port: int, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that joins the group as its first rank, and sends the weights whose names it reads."""
    command = [sys.executable, "-c", TRAINER, f"tcp://127.0.0.1:{port}", str(path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def update(client: Client, process: subprocess.Popen[str], weights: dict[str, torch.Tensor]) -> None:
    """In two parts; the cache is flushed with the last one."""
    assert process.stdin is not None
    assert process.stdout is not None
    client.post("/begin_weight_update", {})
    names = list(weights)
    for part, last in ((names[::2], False), (names[1::2], True)):
        process.stdin.write(" ".join(part) + "\n")
        process.stdin.flush()
        types = [str(weights[name].dtype).removeprefix("torch.") for name in part]
        shapes = [list(weights[name].shape) for name in part]
        body = {"names": part, "dtypes": types, "shapes": shapes, "group_name": "trainer", "flush_cache": last}
        assert client.post("/update_weights_from_distributed", body)["success"]
        assert process.stdout.readline() == "sent\n"
    client.post("/end_weight_update", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("gdn", ()),
        ("gdn", ("--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.05")),
        ("mtp", ("--speculative-algorithm", "STANDALONE")),
    ],
    ids=["static", "elastic", "a draft of its own"],
)
def test_weights_of_a_trainer_serve_every_prompt_anew(
    models: Callable[[str], Path], tmp_path: Path, preset: str, flags: tuple[str, ...]
) -> None:
    before = models(preset)
    if "STANDALONE" in flags:
        if not compat.complete():
            pytest.skip("on a CPU nothing drafts with other versions")
        flags += ("--speculative-draft-model-path", str(models("draft")))
    after = tmp_path / "after"
    shutil.copytree(before, after)
    (path,) = after.glob("*.safetensors")
    generator = torch.Generator().manual_seed(5)
    weights = {name: x + 0.05 * torch.randn(x.shape, generator=generator) for name, x in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    rng = Random(1)
    prompts = [[rng.randrange(3, 200) for _ in range(rng.randint(50, 250))] for _ in range(12)]

    def answers(client: Client) -> list[Prompt]:
        return [client.generate(prompt)[0] for prompt in prompts]

    with Server(after, flags, log=tmp_path / "after.log") as server:
        server.wait_ready(PATIENCE_S)
        wanted = answers(Client(server))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Server(before, flags, log=tmp_path / "before.log") as server, trainer(port, path) as process:
        server.wait_ready(PATIENCE_S)
        client = Client(server)
        old = answers(client)
        assert all(a != b for a, b in zip(old, wanted, strict=True))
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        assert client.post("/init_weights_update_group", {**group, "group_name": "trainer", "backend": "gloo"})[
            "success"
        ]
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        for paused in (True, False):
            load = threading.Thread(target=client.generate_all, args=(prompts, 60))
            load.start()
            if paused:
                client.post("/pause_generation", {"mode": "retract"})
            update(client, process, weights)
            if paused:
                client.post("/continue_generation", {})
            load.join()
            assert answers(client) == wanted
            assert answers(client) == wanted, "from the cache too"
        assert client.post("/update_weights_from_disk", {"model_path": str(before)})["success"]
        assert answers(client) == old
