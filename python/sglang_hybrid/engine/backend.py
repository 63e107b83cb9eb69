"""The radix cache backend `hybrid`: proves that this package is really active, reports, then builds the cache.

An unknown backend name stops SGLang, so a server that serves with `--radix-cache-backend hybrid` has run this module.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_hybrid.core.config import ENVIRONMENT_KEY, HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import report
from sglang_hybrid.engine.launch import disaggregation, platform, rust
from sglang_hybrid.engine.processes import stop
from sglang_hybrid.engine.surface import registration

NAME = "hybrid"

left_alone = False
"""Whether SGLang has loaded its plugins in this process for a server that is not ours."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend and every hook; SGLang applies the hooks right after.

    A process is not told its role: a scheduler, an HTTP server, an `Engine` in somebody's child process load the same
    plugins. So each gets all hooks, and proves them where its role begins: the launcher, a scheduler that builds its
    cache, an HTTP worker that takes its arguments. A server that SGLang's own launcher starts stays SGLang's: it gets
    the backend's name, which explains itself, and on a CPU what it could not start without.
    """
    global left_alone
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_hybrid.engine.frontend.reporting import usage
    from sglang_hybrid.engine.frontend.validation import bodies

    register_radix_cache_backend(NAME, build_cache)
    if platform.on_cpu():
        from sglang_hybrid.engine import cpu

        cpu.register_hooks()
    if not HybridConfig.in_environment():
        left_alone = True
        os.environ.pop(ENVIRONMENT_KEY, None)  # the children of this process would take it for their launcher's
        return
    usage.open_models()
    config = HybridConfig.from_environment()
    features = {"elastic": config.memory == "elastic", "segments": config.segments == "on"}
    asked = [feature for feature, wanted in features.items() if wanted]
    registration.register(["", *asked, *disaggregation.features(), *rust.features(), *bodies.features()])


def build_cache(ctx: Any) -> Any:
    """Radix cache factory, called once in each scheduler process with SGLang's TreeCacheBuildContext."""
    if not HybridConfig.in_environment():
        raise ConfigError("--radix-cache-backend hybrid needs our launcher: start the server with sglang-hybrid serve")
    from sglang_hybrid.engine.cache import build

    registration.verify()
    config = HybridConfig.from_environment()
    spec = report.model_spec(ctx)
    cache = build.build(ctx, config, spec)
    if ctx.tp_rank == 0:
        for line in report.start_block(ctx, cache, config):
            logger.info(line)
    return cache


def explain_dead_child(handler: Any, *_: Any, **__: Any) -> None:
    """Said by the HTTP process before SGLang kills what is left and exits. `handler` is SGLang's SignalHandler."""
    watchdog = handler.tokenizer_manager._subprocess_watchdog
    logger.error("A server process died and the server stops. %s", stop.cause(watchdog))
