"""From what the user asked for to what SGLang is started with; the same for the server and the offline engine."""

from __future__ import annotations

import os
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import disaggregation, early, environment, limits, platform, rust, writable


def enter(rest: list[str], config: HybridConfig, seen: Any | None) -> None:
    """Check what can be checked at once, choose CPU or GPU, and load the plugins.

    SGLang reads the environment when it is imported, so nothing may have imported it before. `rest` is what the user
    gave SGLang, `seen` what early.read found in it, or None where nothing is started. Raises ConfigError.
    """
    environment.forget()
    if seen is not None:
        early.check(seen, config)
        disaggregation.prepare(seen, rest)
    writable.check()
    limits.check(seen)
    from sglang_hybrid.engine.launch import cpu_profile

    # The plugin asks for it; and children may be copies of this process, with the hooks that are registered here.
    config.leave()
    if platform.wants_cpu(rest):
        environment.default(cpu_profile.environment(config))
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # whatever it said: there is nothing else
        from sglang_hybrid.engine import cpu

        cpu.install()
        if seen is not None:
            early.check_programs()
            early.check_model(seen)
            early.check_ranks(seen)
            early.check_memory(config, seen)
    from sglang_hybrid.engine import backend, compat

    compat.check_engine()
    if backend.left_alone:
        raise ConfigError(
            "SGLang loads its plugins once in a process, and something has started it here without this package; start "
            f"sglang_hybrid.Engine first, or in a process of its own: {os.getpid()}"
        )
    from sglang.srt.plugins import load_plugins

    load_plugins()


def complete(namespace: Any, rest: list[str], config: HybridConfig) -> tuple[list[str], list[str]]:
    """SGLang's arguments with our defaults behind those of the user, and notes to print; raises ConfigError.

    `namespace` is `rest` as SGLang's parser reads it. Proves the hooks, and leaves the configuration in the environment
    for the processes to come.
    """
    from sglang_hybrid.engine.hicache import checks
    from sglang_hybrid.engine.launch import (
        arguments,
        fingerprint,
        graphs,
        models,
        server_name,
        settings,
        slots,
        unsettled,
    )
    from sglang_hybrid.engine.surface import registration

    settings.check_files(config, namespace)
    model = models.inspect_model(namespace)
    settings.check_model_is_ours(config, model)
    if platform.on_cpu():  # again: early.read knows no abbreviations
        early.check_ranks(namespace)
        early.check_memory(config, namespace)
    final, namespace = arguments.complete(namespace, rest, config, model)
    settings.check_sizes(namespace, model.spec, slots.per_request_of(namespace))
    notes = (
        model.note,
        arguments.unused_memory(namespace, config, model),
        graphs.note(final[len(rest) :], model),
        unsettled.note(final[len(rest) :], model),
        disaggregation.note(namespace),
        rust.note(),
        checks.note(namespace, model),
    )
    config.leave()
    fingerprint.leave(model.path, model.config, namespace)
    server_name.leave()
    registration.verify()
    registration.replace("replicas")
    return final, [note for note in notes if note]
