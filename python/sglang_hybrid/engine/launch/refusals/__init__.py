"""What SGLang's parser takes and its processes then end on, or answer wrongly by; said before a model is loaded.

| of                                                      | where            |
|---------------------------------------------------------|------------------|
| processes: counts, keys, workers, traces, gRPC          | servers.py       |
| states in SGLang's cache and in ours                    | cache.py         |
| architectures: stages, groups of attention, embeddings  | architectures.py |
| configurations that SGLang reads otherwise              | misread.py       |
| adapters (LoRA)                                         | adapters.py      |
| a plain CPU                                             | cpu.py           |

What our own features cannot be served with is theirs to say: `hicache/checks.py`, `speculation/checks.py`,
`pools/refusals.py`, `segments/refusals.py`.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.engine.launch import rust
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.engine.launch.refusals import adapters, architectures, cache, cpu, misread, servers


def check(namespace: Any, asked: Any, config: HybridConfig, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError for such settings; `namespace` are SGLang's final ones, `asked` what the user gave."""
    servers.check(namespace, on_cpu)
    cache.check(namespace, asked, config, model)
    misread.check(namespace, model)
    architectures.check(namespace, model)
    adapters.check_groups(namespace, on_cpu)
    rust.check(namespace, config)
    if on_cpu:
        cpu.check(namespace, model)
        adapters.check(namespace, model)
