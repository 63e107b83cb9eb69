"""Loaded by the processes of a server of a pair at their start: it ends where it is told to, and tells what it holds.

HANDOVER names a folder. A file `<role>-<point>` in it holds a number n: the n-th time from then on that a server of
that role comes to the point, all its processes are killed (in `writing`: its scheduler alone, a moment later, whatever
it is doing; at `damaged` nothing ends, and one bit of a state that arrived is another one). The file is gone then, so
the server that is started again lives. `held-<port>.json` is what a scheduler with nothing to do has not given back,
and how many sums over what was handed over it has `checked` (`tests/engine/pairs.py` reads both).
"""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

WRITING_S = 0.0002
"""From the begin of a write to the kill: writes of the demo models over loopback take about as long."""

if "HANDOVER" in os.environ:
    from sglang_hybrid.engine import backend

    folder = Path(os.environ["HANDOVER"])
    build_cache = backend.build_cache
    checked = 0

    def reached(role: str, point: str) -> bool:
        """Whether it is now that the server ends."""
        file = folder / f"{role}-{point}"
        try:
            left = int(file.read_text()) - 1
        except (FileNotFoundError, ValueError):
            return False
        if left > 0:
            file.write_text(str(left))
            return False
        file.unlink()
        (folder / "killed").write_text(f"{role}-{point}")
        return True

    def end() -> None:
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def before(owner: Any, name: str, role: str, point: str, when: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if when(*args) and reached(role, point):
                end()
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    def after(owner: Any, name: str, role: str, point: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if reached(role, point):
                end()
            return result

        setattr(owner, name, watched)

    def arm_prefill() -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager as Manager
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue, SchedulerDisaggregationPrefillMixin

        transfer = Manager._transfer_data

        def writing(*args: Any, **kwargs: Any) -> Any:
            if reached("prefill", "writing"):
                signal.setitimer(signal.ITIMER_REAL, WRITING_S)
            return transfer(*args, **kwargs)

        Manager._transfer_data = writing
        after(PrefillBootstrapQueue, "add", "prefill", "asked")
        after(PrefillBootstrapQueue, "finalize_bootstrap", "prefill", "met")
        before(SchedulerDisaggregationPrefillMixin, "_send_kv_chunk", "prefill", "computed")
        before(Manager, "send_kvcache", "prefill", "sending")
        before(Manager, "maybe_send_extra", "prefill", "sent-kv")
        before(Manager, "send_aux", "prefill", "sent-state")
        before(Manager, "conclude_transfer", "prefill", "sent-all")
        after(Manager, "conclude_transfer", "prefill", "told")

    def arm_decode() -> None:
        import torch
        from sglang.srt.disaggregation.decode import (
            DecodePreallocQueue,
            DecodeTransferQueue,
            SchedulerDisaggregationDecodeMixin,
        )

        after(DecodePreallocQueue, "add", "decode", "asked")
        after(DecodePreallocQueue, "_send_kv_metadata", "decode", "met")
        before(
            DecodeTransferQueue, "_poll_with_metadata_gate", "decode", "receiving", lambda queue: len(queue.queue) > 0
        )
        before(DecodeTransferQueue, "_commit_transfer_to_req", "decode", "received")
        after(DecodeTransferQueue, "_commit_transfer_to_req", "decode", "taken")
        before(
            SchedulerDisaggregationDecodeMixin,
            "get_next_disagg_decode_batch_to_run",
            "decode",
            "answering",
            lambda scheduler, **_: not scheduler.running_batch.is_empty(),
        )

        committed = DecodeTransferQueue._commit_transfer_to_req

        def damaged(queue: Any, decode_req: Any) -> Any:
            result = committed(queue, decode_req)
            if reached("decode", "damaged"):
                states = queue.scheduler.req_to_token_pool.mamba_pool.mamba_cache.temporal
                slot = int(decode_req.req.kv.mamba_pool_idx)
                states.view(torch.uint8)[-1, slot].view(-1)[3] ^= 1
            return result

        DecodeTransferQueue._commit_transfer_to_req = damaged

    def held(scheduler: Any) -> dict[str, int]:
        """What is not given back: rows, tokens of KV, states, rows of metadata, rooms, transfers."""
        role = scheduler.disaggregation_mode.value
        stats = scheduler.pool_stats_observer.get_pool_stats()
        rows = scheduler.req_to_token_pool
        queue = getattr(scheduler, f"disagg_{'prefill_bootstrap' if role == 'prefill' else 'decode_prealloc'}_queue")
        manager, metadata = queue.kv_manager, scheduler.req_to_metadata_buffer_idx_allocator
        found = {
            "rows": rows.size + getattr(rows, "pre_alloc_size", 0) - len(rows.free_slots),
            "tokens": int(stats.full_num_used),
            "states": int(stats.mamba_num_used or 0),
            "metadata": metadata.size - metadata.available_size(),
            "rooms": len(manager.request_status),
            "failures": len(manager.failure_records),
        }
        for name in (
            "transfer_infos", "req_to_decode_prefix_len", "_deferred_ack_targets", "_staging_outstanding",
            "required_prefill_response_num_table", "_deferred_abort_ack_tracker", "prefill_response_tracker",
        ):  # fmt: skip
            found[name.strip("_")] = len(getattr(manager, name, ()))
        return found

    def count_checks() -> None:
        from sglang.srt.disaggregation.checksum import KvChecksumComputer

        compute = KvChecksumComputer.compute

        def counted(*args: Any, **kwargs: Any) -> Any:
            global checked
            checked += 1
            return compute(*args, **kwargs)

        KvChecksumComputer.compute = counted

    def tell(scheduler_class: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        original, told = scheduler_class.on_idle, [0.0]

        @wraps(original)
        def on_idle(scheduler: Any) -> Any:
            result = original(scheduler)
            if time.monotonic() > told[0] + 0.2:
                told[0] = time.monotonic()
                rank = get_parallel().tp_rank
                name = f"held-{scheduler.server_args.port}" + (f"-{rank}" if rank else "")
                scratch = folder / f".{name}"
                scratch.write_text(json.dumps({"at": time.time(), "checked": checked, **held(scheduler)}))
                scratch.rename(folder / f"{name}.json")
            return result

        scheduler_class.on_idle = on_idle

    def armed(ctx: Any) -> Any:
        from sglang.srt.managers.scheduler import Scheduler

        from sglang_hybrid.engine import compat

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        role = compat.resolved(ctx.server_args).disaggregation_mode
        if role in ("prefill", "decode"):
            (arm_prefill if role == "prefill" else arm_decode)()
            count_checks()
            tell(Scheduler)
        return build_cache(ctx)

    backend.build_cache = armed  # type: ignore[assignment]
