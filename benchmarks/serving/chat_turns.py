"""The next turn of a long conversation, as chat clients send it: all of its text again.

    python -m benchmarks.serving.chat_turns [--tokens 40000] [--turns 12] [--seed 1]

The first turn is the text of Python's own library, up to `--tokens`; each later one brings some two hundred tokens.
Ours and stock take turns, turn by turn. `as tokens` sends the same prompts to the same server as token ids, which no
server has to make: the bound. While a turn is answered another client asks for `/v1/models` again and again; the
longest it waits is what the turn costs everybody else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks import provenance
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Command, chunks
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server
from sglang_hybrid.demo.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, TURN_END

VOCABULARY, CONTEXT, ANSWER = 8192, 1 << 17, 4
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PAUSE_S = 0.002


def library() -> str:
    """Text that every machine with the same Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))


def build(folder: Path, text: str) -> PreTrainedTokenizerFast:
    """The gated delta rule model of the demo, with a trained vocabulary as models in use have one; its tokenizer."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text[:2_000_000]], trainer)
    model.build(folder, "gdn")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=TURN_END, chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            shape = (VOCABULARY, weights[name].shape[1])
            weights[name] = torch.empty(shape, dtype=weights[name].dtype).normal_(0, 0.02, generator=draw)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return tokenizer


def ask(url: str, path: str, body: dict[str, Any]) -> float:
    """Milliseconds to the first event of a stream, which is read to its end."""
    times = [seconds for seconds, _ in chunks(url + path, body, 900)]
    return 1000 * times[0]


class Bystander(threading.Thread):
    """Asks for the list of models again and again; `longest_ms` is the longest it waited."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._done, self.longest_ms = url, threading.Event(), 0.0

    def run(self) -> None:
        while not self._done.wait(PAUSE_S):
            started = time.perf_counter()
            urllib.request.urlopen(f"{self._url}/v1/models", timeout=900).read()
            self.longest_ms = max(self.longest_ms, 1000 * (time.perf_counter() - started))

    def __enter__(self) -> Bystander:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def turn(server: Server, messages: list[dict[str, str]], tokenizer: Any, as_tokens: bool) -> tuple[float, float]:
    """Milliseconds to the first token, and the longest that somebody else waited."""
    path, body = "/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": ANSWER, "temperature": 0}
    if as_tokens:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        path, body = "/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER}}
    with Bystander(server.url) as other:
        return ask(server.url, path, body), other.longest_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000, help="of the first turn")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    head = provenance.head("sglang", "torch", "tokenizers", "transformers")
    rng, text = random.Random(given.seed), library()
    room = str(3 * (given.tokens + 400 * given.turns))
    sizes = ["--max-total-tokens", room, "--max-mamba-cache-size", "96", "--max-running-requests", "4"]
    stock = [*STOCK, "--mamba-radix-cache-strategy", "extra_buffer", *sizes]
    commands: dict[str, Command] = {
        "stock": ("sglang.launch_server", stock, {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust"}),
        "ours": (LAUNCHER, sizes, {}),
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        tokenizer = build(Path(scratch, "model"), text)
        ids = tokenizer.encode(text[-8 * given.tokens :], add_special_tokens=False)
        document, servers = tokenizer.decode(ids[: given.tokens]), {}
        for name, (launcher, flags, more) in commands.items():
            log, folder = Path(scratch, f"{name}.log"), Path(scratch, "model")
            servers[name] = stack.enter_context(
                Server(folder, flags, log=log, environment={**ENVIRONMENT, **more}, launcher=launcher)
            )
            servers[name].wait_ready()
        kinds = [(name, as_tokens) for name in servers for as_tokens in (False, True)]
        talks = {kind: [{"role": "system", "content": f"tokens: {kind[1]}"}] for kind in kinds}
        found: dict[tuple[str, bool], list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for number in range(given.turns + 1):
            at = rng.randrange(len(text) // 2)
            said = document if number == 0 else text[at : at + 800]
            for kind in kinds:
                talks[kind] += [{"role": "user", "content": said}]
                found[kind].append(turn(servers[kind[0]], talks[kind], tokenizer, kind[1]))
                talks[kind] += [{"role": "assistant", "content": "So it is."}]
        rows = []
        for (name, as_tokens), times in found.items():
            first, waits = ([each[column] for each in times[1:]] for column in (0, 1))
            rows.append(
                {
                    "server": name + (", as tokens" if as_tokens else ""),
                    "ttft_p50_ms": round(statistics.median(first), 1),
                    "ttft_max_ms": round(max(first), 1),
                    "others_wait_p50_ms": round(statistics.median(waits), 1),
                    "first_turn_others_wait_ms": round(times[0][1], 1),
                }
            )
            print(rows[-1], flush=True)
    shape = {**vars(given), "characters": len(document), "flags": sizes}
    print(provenance.write("serving", "chat-turns", {**head, **shape, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
