"""Servers with flags drawn at random: which combinations are wrong, end, hang or are refused.

    python -m benchmarks.serving.combinations [--count 20] [--seed 1] [--preset gdn ...]

Each server has a value of every setting in `settings.py`, the first with even odds, else one at random; of fifty
candidates it is the one that shows most pairs of values that no server before had. Memory is scarce. It answers the
conversations, documents and odd lengths of `soak` in forms drawn at random (with log-probabilities, boundaries, hints,
two at once) while a rude client hangs up and aborts. Every answer is held against a server without a cache, and
transformers judges those that differ. Then the server must free all it holds, answer again, and end with status 0; its
request log must replay to the same decisions. What is refused before the start is named with the reason.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.settings import REFUSED, SETTINGS, blamed, command, drawn, pairs
from benchmarks.serving.soak import COMPLAINTS, ENVIRONMENT, Question, Tally, be_rude, judge, questions
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server, ServerDied
from tests.engine.support import Client

RUNNING = 6
_HELD = r"^sglang:(num_used_tokens|num_running_reqs|num_queue_reqs)\{[^}]*\} (\S+)$"


def ask(client: Client, question: Question, rng: random.Random, priority: bool, tally: Tally) -> None:
    """The question in one of the forms in which clients ask."""
    form = rng.choice(("plain", "plain", "logprob", "boundaries", "hint", "twice"))
    fields: dict[str, Any] = {"return_logprob": True} if form == "logprob" else {}
    if priority and rng.random() < 0.7:
        fields["priority"] = rng.randint(0, 3)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": question.tokens, "ignore_eos": True}
    if form == "boundaries":
        places = sorted({rng.randint(1, len(question.prompt)) for _ in range(2)})
        sampling["custom_params"] = {"cache_boundaries": places}
    if form == "hint":
        sampling["custom_params"] = {"cache_hints": {"back_in_s": rng.choice((1, 20))}}
    prompts = [question.prompt] * 2 if form == "twice" else question.prompt
    try:
        got = client.post("/generate", {"input_ids": prompts, "sampling_params": sampling, **fields}, timeout=300)
    except OSError as error:
        text = error.read().decode(errors="replace")[:200] if hasattr(error, "read") else ""
        tally.add(failed=1)
        tally.unclean.append(f"{form}: {error!r} {text}")
        return
    for answer in got if isinstance(got, list) else [got]:
        tally.answered(question, answer["output_ids"], answer["meta_info"]["cached_tokens"])


def load(client: Client, pool: dict[str, list[Question]], chosen: dict[str, str], seed: int, tally: Tally) -> None:
    """Ask two thirds of it in an order that keeps the turns of a conversation apart, and a sixth anywhere, again."""
    rng = random.Random(seed)
    turns = pool["chat"]
    rest = [*pool["documents"], *pool["odd lengths"]]
    rng.shuffle(rest)
    step = max(1, len(rest) // len(turns))
    order = [each for at, turn in enumerate(turns) for each in (turn, *rest[at * step : (at + 1) * step])]
    order = order[: len(order) * 2 // 3] + rng.sample(order, len(order) // 6)
    stop = threading.Event()
    rude = threading.Thread(target=be_rude, args=(client, stop, seed, tally))
    rude.start()
    try:
        with ThreadPoolExecutor(RUNNING) as threads:
            for future in [
                threads.submit(ask, client, each, random.Random(seed + at), chosen["priority"] == "on", tally)
                for at, each in enumerate(order)
            ]:
                future.result()
    finally:
        stop.set()
        rude.join()


def settled(client: Client, first: Question) -> str:
    """What is wrong with a server that nobody asks: nothing is held after a flush, and it answers as before."""
    client.flush()
    held: dict[str, str] = {}
    for _ in range(60):  # an idle server writes its gauges now and then
        found = re.findall(_HELD, client.get("/metrics"), re.MULTILINE)
        held = {name: value for name, value in found if float(value)}
        if not held:
            break
        time.sleep(1)
    if held:
        return f"held after a flush: {held}"
    return "" if client.generate(first.prompt, first.tokens)[0] == first.answer else "another answer after a flush"


def replayed(log: Path) -> str:
    """What `replay` says against the log; empty if every decision was taken again."""
    run = [sys.executable, "-m", "sglang_hybrid", "replay", str(log)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-400:]


def tried(
    folder: Path, chosen: dict[str, str], pool: dict[str, list[Question]], seed: int, keep: Path | None
) -> dict[str, Any]:
    """One server: counts, and `faults`, which is empty if all is as it should be."""
    row: dict[str, Any] = {
        "preset": chosen["preset"],
        "set": {name: chosen[name] for name, values in SETTINGS.items() if chosen[name] != next(iter(values))},
    }
    tally = Tally()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        flags, environment = command(chosen, place, 20_000 + seed % 900)
        server = Server(folder, flags, log=place / "server.log", environment=environment)
        try:
            server.wait_ready(300)
        except ServerDied as error:
            refusal = "".join(line for line in str(error).splitlines() if line.startswith("error: "))
            clean = server.process.returncode == 2 and refusal
            return {**row, "refused": refusal, "faults": [] if clean else [f"no clean refusal: {str(error)[-900:]}"]}
        client = Client(server)
        try:
            load(client, pool, chosen, seed, tally)
            if server.process.poll() is not None:
                faults.append("the server ended")
            elif trouble := settled(client, pool["documents"][0]):
                faults.append(trouble)
        except Exception as error:  # whatever it is, it is this combination's
            faults.append(f"{type(error).__name__}: {error}")
        finally:
            status = server.stop(60)
        if status:
            faults.append(f"ended with status {status}")
        text = server.log.read_text(errors="replace").partition("SIGTERM received")[0]
        faults += sorted({line[:300] for line in text.splitlines() if re.search(COMPLAINTS, line)})[:5]
        if chosen["log"] == "written" and (other := replayed(place / "requests.log")):
            faults.append(f"replay: {other}")
        verdict = judged(tally, folder)
        faults += tally.unclean[:3] + [f"wrong answers: {verdict['wrong']}"] * bool(verdict["wrong"])
        if faults and keep is not None:
            (keep / f"{chosen['preset']}-{seed}.log").write_text(text)
    return {**row, **tally.counts, **verdict, "faults": faults}


def judged(tally: Tally, folder: Path) -> dict[str, int]:
    """Ties and wrong answers; one of another length is wrong."""
    short = [each for each in tally.different if len(each[0].answer) != len(each[1])]
    tally.different = [each for each in tally.different if len(each[0].answer) == len(each[1])]
    verdict = judge(tally, folder)
    return {**verdict, "wrong": verdict["wrong"] + len(short)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["gdn", "mamba2", "kda", "conv", "mtp"])
    parser.add_argument("--count", type=int, default=20, help="servers that start, for each preset")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-logs", type=Path, default=None, help="folder for the logs of servers with faults")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    if options.keep_logs is not None:
        options.keep_logs.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    refused = list(REFUSED)
    with tempfile.TemporaryDirectory() as scratch:
        for number, preset in enumerate(options.preset):
            rng = random.Random(f"{options.seed} {preset}")
            folder = model.build(Path(scratch) / preset, preset)
            off = ("--disable-radix-cache", "--max-running-requests", str(RUNNING))
            with Server(folder, off, log=Path(scratch) / "off.log", environment=ENVIRONMENT) as server:
                server.wait_ready(300)
                pool = questions(Client(server), options.seed)
            started = 0
            while started < options.count:
                chosen = drawn(rng, preset, seen, refused)
                begun = time.monotonic()
                seed = 1000 * options.seed + 100 * number + len(rows)
                row = tried(folder, chosen, pool, seed, options.keep_logs)
                rows.append({**row, "s": round(time.monotonic() - begun, 1)})
                print(rows[-1], flush=True)
                if "refused" in row:
                    refused.append(blamed(row["refused"], chosen))
                else:
                    started += 1
                seen |= pairs(chosen)
    total = Counter({"faults": sum(bool(row["faults"]) for row in rows), "servers": len(rows)})
    for row in rows:
        total.update({key: row.get(key, 0) for key in ("answered", "equal", "ties", "wrong")})
    print(dict(total))
    if not options.dry:
        head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
        result = {**head, "seed": options.seed, "total": dict(total), "rows": rows}
        print(provenance.write("serving", "combinations", result))


if __name__ == "__main__":
    main()
