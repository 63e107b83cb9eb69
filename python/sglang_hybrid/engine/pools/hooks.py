"""The places in SGLang at which elastic memory has a say; registered only where it was asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.pools import arena as arenas
from sglang_hybrid.engine.pools.memory import memory_of
from sglang_hybrid.engine.surface import registration

logger = logging.getLogger(__name__)

_KV_TAG = "kv_cache"
_SETTLE_EVERY_S = 0.2
_DOZE_S = 0.01


def build(original: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang builds its pools: let it find our classes under the names it uses."""
    registration.replace("elastic")
    return original(configurator, *args, **kwargs)


def continue_chunk(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """The next chunk of a request runs once its pages are held; until then it stays where it is."""
    if memory_of(adder.tree_cache).room_for_chunk(adder, req):
        return original(adder, req, *args, **kwargs)
    return req


def passed(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """The pages of a pass were taken: what is held now is held for nobody."""
    held = memory_of(batch.tree_cache)
    held.begin_pass()
    held.telemetry.tick()


def idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Give unused memory back once it was unused for a while; rest a little if all that is left to do is to wait.

    SGLang looks for leaks next: it reads the free pages of both kinds, then their sums. Ids of freed pages that arrive
    from the device in between would pass for a leak, and end the server.
    """
    held = memory_of(scheduler.tree_cache)
    held.arena.collect()
    if held.just_refused():
        _doze(scheduler)
    if held.arena.clock() - held.arena.settled_s >= _SETTLE_EVERY_S:
        while held.arena.settle() and not _somebody_waits(scheduler):
            pass
        held.telemetry.tick()


def strided_convolution(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Mamba-2 layers of every model convolve with Triton, which some ask for and Falcon-H1 does not.

    States of all layers lie side by side, so slots are far apart. The compiled convolution multiplies slot and distance
    in 32 bits: beyond 2**32 elements, 8.6 GB of bfloat16, it would read and write the windows of other requests.
    """
    return args, {**kwargs, "use_triton_causal_conv": True}


def padding_with_memory(kernel: Any, *args: Any, cache_indices: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """BEFORE hook of FlashInfer's gated delta rules: a row of padding, -1, is slot 0's, as on Blackwell.

    On Hopper they read and write the last slot of the pool for it, of which an elastic pool has only the address.
    """
    return (kernel, *args), {**kwargs, "cache_indices": cache_indices.clamp(min=0)}


def tails_with_memory(*_: Any, page_table: Any = None, **__: Any) -> None:
    """BEFORE hook of what fills tables of pages for TensorRT-LLM's attention: behind a prompt's end they name page 0.

    SGLang fills what a prompt has, and leaves what another had there before. The kernels load whole tiles of pages,
    bounded by the pages of the pool and not by the prompt; an elastic pool has memory for those in use alone.
    """
    if page_table is not None:
        page_table.zero_()


def whole_copies(_: Any, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of TensorRT-LLM's attention: raise ConfigError where its prefills copy all KV of a layer.

    They do on other GPUs than B200s and their like, page by page whether it has memory or not.
    """
    if backend.use_fmha_v2 and model_runner.prefill_attention_backend_str == "trtllm_mha":
        raise ConfigError(
            "elastic memory cannot serve this: on this GPU SGLang before 0.5.23 copies the whole pool for a prefill "
            "with this attention; use --prefill-attention-backend triton, or add --hybrid-memory static: trtllm_mha"
        )


def _doze(scheduler: Any) -> None:
    """Nobody runs and who waits cannot start: SGLang would ask again at once, and keep a core busy with it."""
    poller = _poller(scheduler)
    if poller is None:
        time.sleep(_DOZE_S)
    else:
        poller.poll(1000 * _DOZE_S)


def _somebody_waits(scheduler: Any) -> bool:
    """Whether a message lies in a socket of the scheduler; True where it cannot be told."""
    poller = _poller(scheduler)
    return poller is None or bool(poller.poll(0))


def _poller(scheduler: Any) -> Any:
    """Of the sockets that wake a sleeping scheduler; None if it never sleeps."""
    return getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)


def release(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """Give memory back: of KV and states whatever nobody reads, idle or not; weights only if SGLang can."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    tags = list(recv_req.tags or [])
    if not tags or _KV_TAG in tags:
        granules = memory_of(updater.scheduler.tree_cache).release()
        logger.info("gave %d granules of %d bytes back", granules, arenas.current().sizing.granule_bytes)
    rest = [tag for tag in tags if tag != _KV_TAG]
    if not rest:
        return ReleaseMemoryOccupationReqOutput()
    recv_req.tags = rest
    return original(updater, recv_req)


def resume(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """KV and states need no resuming: their memory comes back when it is used."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    rest = [tag for tag in recv_req.tags or [] if tag != _KV_TAG]
    if not rest:
        return ResumeMemoryOccupationReqOutput()
    recv_req.tags = rest
    return original(updater, recv_req)
