"""A plug-in of SGLang for tests: its GDN prefill gives back states as FlashInfer's does, from the kernel of the CPU.

SGLang plans the checkpoints, tracks the states and copies them with its own code; only the kernel is another one.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

CHUNK = 64


class FlashInferOnCpu:
    """Takes the place of FlashInferGDNKernel: checkpoints behind every so many tokens, only if they were asked for."""

    uses_state_checkpoints = True

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def extend(self, *args: Any, **given: Any) -> Any:
        count, every = given.pop("num_state_checkpoints"), given.pop("state_checkpoint_every_n_tokens")
        starts = given.pop("state_checkpoint_cu_starts")
        output, last, before = self._kernel.extend(*args, **given)
        if not count:
            return output, last, None
        lengths = [end - begin for begin, end in pairwise(given["query_start_loc"].tolist())]
        assert every == CHUNK
        assert starts.tolist() == list(accumulate((n // every for n in lengths), initial=0))
        assert count == starts[-1]
        states, slots, chunk = [], given["cache_indices"].tolist(), 0
        for n, slot in zip(lengths, slots, strict=True):
            chunks = -(-n // CHUNK)
            states += [before[0, chunk + at] for at in range(1, chunks)]  # before a chunk is behind the one before it
            states += [given["ssm_states"][slot]] if n % CHUNK == 0 else []
            chunk += chunks
        import torch

        return output, last, torch.stack(states).unsqueeze(0)


def replace(_: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of the dispatcher's initialiser."""
    dispatcher.extend_kernel = FlashInferOnCpu(dispatcher.extend_kernel)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher.__init__"
    HookRegistry.register(target, replace, HookType.AFTER)
