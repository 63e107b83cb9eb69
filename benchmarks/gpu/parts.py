"""The parts of a day on a GPU, each in processes of its own and over in nine minutes."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S = 540


@dataclass(frozen=True)
class Part:
    """`command` without the interpreter and `result`, the file that it writes below the folder of results.

    Every command knows --rehearse. `writes_to`: it takes that folder as --out, the others find it in the environment.
    `packages`: it needs SGLang, which a kit may bring, and takes --kit, --work and --model.
    """

    title: str
    command: tuple[str, ...]
    result: str
    rehearsed: str = ""
    limit_s: int = LIMIT_S
    writes_to: bool = False
    packages: bool = False


_SERVERS = ("-m", "benchmarks.gpu.servers")

PARTS = {
    "driver": Part(
        "what the driver does, for elastic memory", ("-m", "benchmarks.memory.gpu"), "gpu.json", writes_to=True
    ),
    "kernels": Part(
        "every kernel, checked and timed",
        ("-m", "benchmarks.kernels.run", "--timeout", "120", "--limit", "410"),
        "kernels/run.json",
        "kernels/rehearsal.json",
    ),
    "servers": Part("servers, one at a time", _SERVERS, "servers.json", writes_to=True, packages=True),
    "elastic": Part(
        "elastic beside static memory", (*_SERVERS, "--elastic"), "elastic.json", writes_to=True, packages=True
    ),
    "races": Part("races inside kernels", ("-m", "benchmarks.kernels.sanitize"), "kernels/sanitize.json"),
}
