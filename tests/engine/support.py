"""A client with token ids in and out, and the transformers reference that judges every token."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_hybrid.demo.server import Server

Prompt = list[int]

PATIENCE_S = 900.0
"""Only what hangs takes this long, on however slow or busy a machine."""


def eventually(what: Callable[[], object], every_s: float = 0.1) -> bool:
    """Whether `what` comes true within PATIENCE_S; it is asked every `every_s` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(every_s)
    return False


class Client:
    """SGLang's native endpoint with token ids in and out: nothing is tokenised, nothing is hidden."""

    def __init__(self, server: Server, key: str = "") -> None:
        self.server = server
        self.key = key

    def post(self, path: str, body: dict[str, Any], timeout: float = PATIENCE_S) -> Any:
        with self.open(path, json.dumps(body).encode(), timeout) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str) -> str:
        with self.open(path, None, PATIENCE_S, "GET") as response:
            return str(response.read().decode())

    def answer(self, path: str, body: Any = None, timeout: float = PATIENCE_S, method: str = "POST") -> tuple[int, str]:
        """Status and text of the answer, whatever they are; `body` is sent as JSON, bytes as they are."""
        data = body if isinstance(body, bytes) or (body is None and method == "GET") else json.dumps(body).encode()
        try:
            with self.open(path, data, timeout, method) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def open(self, path: str, data: bytes | None, timeout: float, method: str = "POST") -> Any:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        return urllib.request.urlopen(request, timeout=timeout)

    def flush(self) -> None:
        """Empty the cache, as soon as the server is idle: it refuses while a request runs or a client just hung up."""
        assert eventually(self._flushed), "the server does not become idle: something was left running"

    def _flushed(self) -> bool:
        try:
            return "flushed" in str(self.post("/flush_cache", {}))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            error.close()
            return False

    def batches(self, kind: str) -> int:
        """Passes of a kind, 'Prefill' or 'Decode', that the log tells of; of decoding one in forty."""
        return self.server.log.read_text(encoding="utf-8", errors="replace").count(f"{kind} batch")

    def asked(self, prompt: Prompt, **sampling: Any) -> http.client.HTTPConnection:
        """A connection on which `prompt` was asked; to close it is to hang up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        sampling = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        return connection

    def generate(
        self, prompt: Prompt, tokens: int = 8, timeout: float = PATIENCE_S, **fields: Any
    ) -> tuple[Prompt, int]:
        """Greedy continuation and the number of prompt tokens that came from the cache."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **fields}, timeout)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    def generate_all(self, prompts: Sequence[Prompt], tokens: int = 8, at_once: int = 8) -> list[tuple[Prompt, int]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens), prompts))


def ask(client: Client, prompt: Prompt, tokens: int = 8, **more: Any) -> dict[str, Any]:
    """The whole answer of `/generate` to a prompt that is continued greedily; `sampling` changes its parameters."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling", {})}
    answer: dict[str, Any] = client.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})
    return answer


def cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that came from the cache."""
    return int(answer["meta_info"]["cached_tokens"])


def misses(answer: dict[str, Any]) -> dict[str, int]:
    """Tokens of the prompt that did not, by reason."""
    details = answer["meta_info"]["cached_tokens_details"]
    return {key.removeprefix("miss_"): count for key, count in details.items() if key.startswith("miss_")}


def events(client: Client, name: str) -> float:
    """How often the event of the cache was counted so far."""
    said = [line for line in client.get("/metrics").splitlines() if f'event="{name}"' in line]
    return sum(float(line.split()[-1]) for line in said if "mamba_cache_events_total{" in line)


def elastic_metric(client: Client, name: str, kind: str = "") -> float:
    """A figure of elastic memory, of one `kind` of pool or call where it has several."""
    label = f'kind="{kind}"' if kind else ""
    pattern = rf"^sglang:elastic_memory_{name}(?:_total)?{{[^}}]*{label}[^}}]*}} (\S+)$"
    found = re.search(pattern, client.get("/metrics"), re.MULTILINE)
    assert found is not None, f"{name} {kind} is not among the metrics"
    return float(found[1])


class Reference:
    """The same weights in transformers, float32, or in `demo/kimi.py` where it lacks the model: the judge of tokens."""

    # Two float32 implementations differ by about 2e-5 in a logit; a smaller gap between two tokens is a tie.
    tie = 2e-4
    # Where two experts are as near as that, implementations take different ones, and all behind it differs. Router
    # logits differ by some 2e-6: one server took either of two that are 4.5e-6 apart here, by what shared the pass.
    router_tie = 1e-5

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from sglang_hybrid.demo import kimi

        torch.set_num_threads(1)  # the servers need the other cores
        self.torch = torch
        self.config = json.loads((folder / "config.json").read_text())
        self.is_kimi = self.config["architectures"] == [kimi.ARCHITECTURE]
        self.model = (
            kimi.KimiLinear.from_pretrained(folder)
            if self.is_kimi
            else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        )

    def logits(self, prompt: Prompt, output: Prompt) -> Any:
        """Logits that chose each output token, shape [len(output), vocabulary]."""
        tokens = self.torch.tensor(prompt + output)
        with self.torch.no_grad():
            logits = self.model(tokens) if self.is_kimi else self.model(tokens[None]).logits[0]
        return logits[len(prompt) - 1 : -1].float()

    def router_gap(self, tokens: Prompt) -> float:
        """The smallest gap between the last expert that is taken and the first that is not, over layers and tokens."""
        taken, gaps = (
            self.config.get("num_experts_per_tok") or self.config.get("num_experts_per_token", 0),
            [float("inf")],
        )

        def look(_: Any, __: Any, output: Any) -> None:
            logits = output if self.torch.is_tensor(output) else output[0]
            best = logits.sort(-1, descending=True).values
            gaps.append((best[..., taken - 1] - best[..., taken]).min().item())

        gates = [
            gate for name, gate in self.model.named_modules() if name.endswith(("mlp.gate", "block_sparse_moe.gate"))
        ]
        hooks = [gate.register_forward_hook(look) for gate in gates]
        self.logits(tokens[:-1], tokens[-1:])
        for hook in hooks:
            hook.remove()
        return min(gaps)

    def assert_greedy(self, prompt: Prompt, output: Prompt, what: str = "") -> None:
        """Each token is the most likely one given those before it, up to a tie."""
        logits = self.logits(prompt, output)
        behind = logits.max(-1).values - logits.gather(1, self.torch.tensor(output)[:, None])[:, 0]
        worst = behind.max().item()
        if worst > self.tie and self.router_gap(prompt + output) < self.router_tie:
            return
        assert worst <= self.tie, f"{what} prompt of {len(prompt)} tokens: a token is {worst:.1e} below the best"

    def assert_same(self, prompt: Prompt, one: Prompt, other: Prompt, what: str = "") -> None:
        """Equal outputs, or equal up to a tie at the first difference."""
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is None:
            return
        row = self.logits(prompt, one)[at]
        gap = abs(row[one[at]] - row[other[at]]).item()
        if gap > self.tie and self.router_gap(prompt + one[: at + 1]) < self.router_tie:
            return
        assert gap <= self.tie, f"{what} prompt of {len(prompt)} tokens: outputs differ at {at}, logits {gap:.1e} apart"
