"""The supported range of SGLang versions, and names that moved between them; `surface` lists what is used of each."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import re
from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.errors import IncompatibleEngine
from sglang_hybrid.engine.surface import check
from sglang_hybrid.engine.surface.hicache import HOST_POOLS
from sglang_hybrid.engine.surface.hooks import HOOKS, REPLACED
from sglang_hybrid.engine.surface.rows import number

OLDEST, NEWEST_EXCLUSIVE = (0, 5, 17), (0, 5, 24)
PRIMARY = "0.5.21"
COMPLETE = (PRIMARY, "0.5.23")
"""With these elastic memory and segments were run; with others what takes less of SGLang is served."""


def engine_version() -> str:
    """Version of the installed SGLang; raises IncompatibleEngine if there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version: str | None = importlib.metadata.version("sglang")
        if version is not None:  # as it is of a folder that an interrupted pip left behind
            return version
    raise IncompatibleEngine(
        "SGLang is not installed; sglang-hybrid doctor names the command: no distribution 'sglang'"
    )


def check_version(version: str) -> None:
    """Raise IncompatibleEngine unless `version` lies in the supported range."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= tuple(int(part) for part in match.groups()) < NEWEST_EXCLUSIVE:
        oldest, newest = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST_EXCLUSIVE))
        raise IncompatibleEngine(
            f"this release works with SGLang >= {oldest} and < {newest}; install sglang=={PRIMARY}: found {version}"
        )


def check_engine() -> str:
    """Return SGLang's version if it is supported and has what is used of it; raise IncompatibleEngine otherwise."""
    version = engine_version()
    check_version(version)
    if missing := check.missing(check.required(version)):
        raise IncompatibleEngine(
            f"SGLang {version} lacks what this release builds on; install sglang=={PRIMARY}: {', '.join(missing)}"
        )
    return version


def complete() -> bool:
    """Whether everything was run with the installed version."""
    return engine_version() in COMPLETE


def at_least(version: str) -> bool:
    """Whether the installed version of SGLang is `version` or newer."""
    return number(engine_version()) >= number(version)


def has_host_pools() -> bool:
    """Whether this version keeps HiCache's host pools where the CPU platform can serve them."""
    version = engine_version()
    return all(row.holds(version) for row in (*HOOKS, *REPLACED) if row.target.startswith(HOST_POOLS))


def resolved(server_args: Any) -> Any:
    """The settings a server really runs with: newer versions keep `server_args` as the user's raw input."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args  # 0.5.17 resolves in place
    return resolving_view(server_args)


def settings_merger() -> Any:
    """SGLang's class that puts a `--config` file and a command line together."""
    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ImportError:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger  # 0.5.17
    return ConfigArgumentMerger


def pools_index() -> bool:
    """Whether an index beside latent KV has one key for the tokens that share it, and not room for one of each."""
    return at_least("0.5.23")


def beside_states(pool: Any) -> list[Any]:
    """What SGLang keeps by the same slots beside its `pool` of states (`MambaPool`), and copies with them.

    Windows [layers, slots, channels, tokens] and last tokens [slots, tokens] of Qwen4-Exp; nothing of other models.
    """
    siblings = getattr(pool, "_slot_siblings", ())
    return [each.conv_state if hasattr(each, "conv_state") else each.context for each in siblings]


def checkpoint_grid() -> int:
    """Tokens between the positions at which extra_buffer can save a state; call it in a scheduler process."""
    try:
        from sglang.srt.runtime_context import mamba_cache_chunk_size
    except ImportError:
        from sglang.srt.runtime_context import get_server_args  # 0.5.17

        return int(get_server_args().mamba_cache_chunk_size)
    return int(mamba_cache_chunk_size())


def track_tokens(interval: int, page: int) -> int:
    """Tokens between the states that a growing answer leaves, by `--mamba-track-interval`; 0 for none."""
    grids = (checkpoint_grid(), page) if at_least("0.5.21") else ()
    return math.lcm(interval, *grids) if interval else 0


@functools.cache
def walks_on() -> bool:
    """Whether SGLang's walk for victims goes on behind one inside the tree, which it evicts and does not name.

    That of 0.5.17 takes it for the end of the walk, though more is asked for.
    """
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceNextNodeResult

    return hasattr(EvictDeviceNextNodeResult(), "made_progress")


def state_of(req: Any) -> Any:
    """The object that holds a request's state slots (`mamba_pool_idx` and its like)."""
    kv = getattr(req, "kv", None)
    return kv if hasattr(kv, "mamba_pool_idx") else req  # 0.5.17 keeps them on the request


def detach_kv(req: Any) -> None:
    """Let `req`, a turn of a session, have nothing any more of what its session keeps, KV and states."""
    if hasattr(req, "detach_kv"):
        req.detach_kv()
        return
    req.kv = req.req_pool_idx = None  # 0.5.17
    req.mamba_pool_idx = req.mamba_ping_pong_track_buffer = None
    req.mamba_next_track_idx = req.mamba_last_track_seqlen = req.mamba_branching_seqlen = None


def leave_session(end: Callable[[], bool], sessions: Any, req: Any) -> bool:
    """Have all of `req`, a turn that is not over, released, with what its session keeps; whether it is by now.

    `sessions` are SGLang's StreamingSession, and `end` its call, which takes `req` for a turn that has ended.
    """
    if hasattr(sessions, "borrowed_slot"):  # since 0.5.22 it is released as any other's, once the session has let go
        slot = sessions.slots.pop(req.session.session_id)
        req.lock, slot.lock = slot.lock, None
        req.session.abort_req()
        return False
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT()
    try:
        return end()
    finally:
        req.finished_reason = None


def image_embeddings() -> Any:
    """SGLang's cache of what images, videos and sounds became in the encoder; None before it has one."""
    try:
        from sglang.srt.managers import mm_schedule as holder
    except ImportError:
        from sglang.srt.managers import mm_utils as holder  # 0.5.17
    return holder.embedding_cache


def leads() -> bool:
    """Whether this rank speaks for those that decide alike: the first, of a group with data-parallel attention."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_tp_rank == 0)


def trusts_templates() -> bool:
    """In a serving HTTP process: whether chat templates that requests bring are rendered; 0.5.17 has no such flag."""
    if not at_least("0.5.21"):
        return False
    from sglang.srt.runtime_context import get_serving

    return bool(get_serving().trust_request_chat_template)


def prefix_tokens(req: Any) -> int:
    """Tokens of `req` that stand before its next pass."""
    return int(req.prefix_len) if hasattr(req, "prefix_len") else len(req.prefix_indices)  # until 0.5.22


def pass_end(req: Any) -> int:
    """Tokens of `req` up to the end of the pass that was chosen for it."""
    return int(req.extend_end if hasattr(req, "extend_end") else req.extend_range.end)  # until 0.5.22


def pass_states(lazy: bool) -> int:
    """Free state slots that are wanted for each request of a pass, 0 for as many as it takes."""
    if at_least("0.5.22"):
        return 0
    from sglang.srt.mem_cache.common import MAMBA_STATE_PER_REQ_PREFIX_CACHE as WHOLE
    from sglang.srt.mem_cache.common import MAMBA_STATE_PER_REQ_PREFIX_CACHE_LAZY as LAZY

    return int(LAZY if lazy else WHOLE)


def draft_runners(worker: Any) -> list[Any]:
    """The runners of the models that draft for `worker`, which may be None or have none, as with n-grams."""
    if hasattr(worker, "weight_update_runners"):  # since 0.5.21
        return [runner for _, runner in worker.weight_update_runners()]
    return list(getattr(getattr(worker, "draft_worker", None), "draft_runners", ()))


def matched_tokens(result: Any) -> int:
    """Tokens of a match of the prefix tree that are on the device."""
    return int(result.device_prefix_len if hasattr(result, "device_prefix_len") else len(result.device_indices))


def is_raw_strength(gate: Any) -> bool:
    """Whether SGLang gives its backend the strength of Kimi delta attention before the sigmoid; `gate` comes with it.

    Of the versions that serve segments 0.5.21 does so only where the gate is flat, [1, tokens, heads * K].
    """
    return gate.dim() == 3 or engine_version() != "0.5.21"


def plan_locations(forward_batch: Any, runner: Any) -> None:
    """Give a ForwardBatch that has requests of another one the KV locations of its own, where SGLang plans them."""
    if getattr(forward_batch, "kv_loc_plan", None) is not None:  # since 0.5.23
        translator = runner.kv_index_translator
        translator.own_plan(forward_batch).bind(forward_batch, translator)
