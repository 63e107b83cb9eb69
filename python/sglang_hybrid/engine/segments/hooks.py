"""The places in SGLang at which segments have a say; registered only where they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.engine.cache.hooks import coordinator_of
from sglang_hybrid.engine.cache.passes.prefill_states import is_in_graph, linear_backend
from sglang_hybrid.engine.cache.requests import tracked
from sglang_hybrid.engine.segments import forward, heads, schedule
from sglang_hybrid.engine.segments.composer import Composer


def composer_of(cache: Any) -> Composer | None:
    """The composer of a cache, None for caches without segments."""
    coordinator = coordinator_of(cache)
    return None if coordinator is None else coordinator.composer


def reserve(configurator: Any, rest: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of how SGLang divides the memory that is left, `rest` in GiB: a buffer of segments is taken first."""
    config = HybridConfig.from_environment()
    taken = 0.0 if config.memory == "elastic" else config.segment_bytes / (1 << 30)
    return (configurator, rest - taken), {}


def turn(scheduler: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of Scheduler.process_input_requests, with which every round of its loop begins."""
    composer = composer_of(scheduler.tree_cache)
    # While generation is paused in place, rounds come and go and the last pass may still run.
    if composer is not None and not getattr(scheduler, "_engine_paused", False):
        composer.turn()
    return (scheduler, *args), kwargs


def weights_change(updater: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of what every update of weights begins with."""
    composer = composer_of(updater.scheduler.tree_cache)
    if composer is not None and composer.exchange is not None:
        composer.exchange.outdated()


def continue_chunk(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of PrefillAdder.add_chunked_req."""
    composer = composer_of(adder.tree_cache)
    if composer is None or composer.prompt(req) is None:
        return original(adder, req, *args, **kwargs)
    return schedule.continue_chunk(composer, original, adder, req)


def track(original: Callable[..., Any], batch: Any, req: Any) -> Any:
    """AROUND hook of what SGLang tracks of a pass: of a composed one our own rows save the states."""
    segments = tracked(req).segments
    if not segments or segments.open is None or not segments.open.composed:
        return original(batch, req)
    names = ("mamba_last_track_idx", "mamba_next_track_idx", "mamba_last_track_seqlen")
    before = {name: getattr(req.kv, name) for name in names}
    entry = original(batch, req)
    for name, value in before.items():
        setattr(req.kv, name, value)
    return entry._replace(track_mask=False, track_seqlen=-1)


def shorten(original: Callable[..., Any], cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of ForwardBatch.init_new."""
    composer = composer_of(batch.tree_cache)
    if composer is None:
        return original(cls, batch, *args, **kwargs)
    return forward.shorten(composer, original, cls, batch, *args, **kwargs)


def outside_a_graph(can: bool, runner: Any, batch: Any) -> bool | None:
    """AFTER hook of the choice of a CUDA graph for a prefill: a composed pass runs its linear layers by ours, and the
    whole of a head, whose graph knows another backend."""
    model = runner.model_runner
    ours = model.is_draft_worker or is_in_graph(linear_backend(model))
    return False if can and ours and forward.running(batch) is not None else None


def absorbed(_: Any, attention: Any, forward_batch: Any) -> Any:
    """AFTER hook of the choice of a method for latent attention: a pass of composed prompts sees latents.

    SGLang's other methods give the backend keys and values of the new tokens instead, and copied interiors have none.
    """
    if forward.running(forward_batch) is None:
        return None
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


plan, extend, draft = forward.plan, forward.extend, heads.draft
