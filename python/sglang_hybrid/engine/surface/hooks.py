"""Which of SGLang's functions are hooked, and which names in its modules get another value: all the lists as one."""

from __future__ import annotations

from sglang_hybrid.engine.surface.cache import CACHE
from sglang_hybrid.engine.surface.cpu import CPU, CPU_REPLACED
from sglang_hybrid.engine.surface.elastic import ELASTIC, ELASTIC_REPLACED
from sglang_hybrid.engine.surface.frontend import FRONTEND
from sglang_hybrid.engine.surface.hicache import HICACHE, HICACHE_REPLACED
from sglang_hybrid.engine.surface.pairs import PAIRS
from sglang_hybrid.engine.surface.rows import LAUNCHER, SCHEDULER, Hook, Replaced
from sglang_hybrid.engine.surface.scheduler import SCHEDULER_HOOKS
from sglang_hybrid.engine.surface.segments import SEGMENTS
from sglang_hybrid.engine.surface.speculation import DRAWING, SPECULATION

HOOKS: tuple[Hook, ...] = (
    *CPU,
    *CACHE,
    # Each runs after the next: a request that is held has left its stamp, and one is refused when it would be handled.
    Hook("srt.managers.scheduler:Scheduler.process_input_requests", "BEFORE", "scheduler.released:refuse", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler.process_input_requests", "BEFORE", "scheduler.idle:hold", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler.process_input_requests", "BEFORE", "cache.clock:take_stamps", SCHEDULER),
    *SPECULATION,
    *PAIRS,
    *ELASTIC,
    *SEGMENTS,
    *FRONTEND,
    *SCHEDULER_HOOKS,
    *HICACHE,
)
"""Where two have one target, those AFTER it run in this order, those BEFORE and AROUND it in the opposite one."""

REPLACED: tuple[Replaced, ...] = (
    # Found by its name in a process that is spawned.
    Replaced(
        "srt.entrypoints.engine:run_data_parallel_controller_process",
        "processes.replicas:control",
        LAUNCHER,
        "replicas",
    ),
    *DRAWING,
    *CPU_REPLACED,
    *HICACHE_REPLACED,
    *ELASTIC_REPLACED,
)
