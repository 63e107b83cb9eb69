"""Where a server can save states, by its kernels and its strategy, for a cache that plays whole requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.served import Saves, of_layers
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import answer_place, own_place, places

STRATEGIES = ("auto", "extra_buffer", "no_buffer", "paper")
"""Values of `simulate --strategy`: a server's --mamba-radix-cache-strategy, or states anywhere, as papers simulate."""

_GRID = 64  # SGLang's, of models whose layers are not known
_TRACK_TOKENS = 256  # SGLang's default of --mamba-track-interval


@dataclass(frozen=True)
class Saving:
    """The fields mean what they do in `sim.shape.Shape`; `buffered`: the server has SGLang's extra buffer."""

    grid: int = _GRID
    step: int = 1
    buffered: bool = True
    track_tokens: int = _TRACK_TOKENS
    page: int = 1

    def places(self, positions: Sequence[int], start: int, prompt: int, end: int) -> dict[int, int]:
        """Where a request that computes [start, prompt) and then an answer up to `end` saves states.

        With the position that each stands for: `positions` of its prompt, the last token of the prompt, and `end`.
        """
        inside = [at for at in positions if at < prompt]
        found = places(inside, start, prompt, self.grid, self.step, self.page) if self.step else {}
        computed = max(prompt, end - 1)  # nobody computes the last token of an answer
        if not self.buffered:
            return {**(found or {prompt: prompt - 1}), computed: end}
        if (at := own_place(start, prompt, self.grid)) > start:
            found[at] = prompt - 1
        if at := answer_place(prompt, computed, self.track_tokens):
            found[at] = end
        return found

    def stock(self, start: int, prompt: int, end: int, kv_tokens: int) -> dict[int, int]:
        """The same of SGLang's own cache: one state of the prompt, at the branch point if there is one in reach."""
        found = self.places((), start, prompt, end)
        branch = kv_tokens // self.grid * self.grid
        if self.buffered and start < branch <= prompt:
            found.pop(own_place(start, prompt, self.grid), None)
            found[branch] = kv_tokens
        return found

    def describe(self) -> str:
        """In words, for the line of a model."""
        if self.buffered:
            return f"extra_buffer, a prefix is reused to multiples of {self.grid} tokens"
        if self.step > 1:
            return f"no_buffer, a prefill has states every {self.step} tokens"
        return "no_buffer, a prefill has a state at any token" if self.step else "no_buffer, a prefill has one state"


def of_model(model: ModelSpec, strategy: str = "auto") -> Saving | None:
    """How a server with default flags saves states of `model`; None where `strategy` is the papers'.

    Raises ConfigError for a strategy that SGLang does not have for the model.
    """
    if strategy == "paper":
        return None
    row = of_layers(model.layer_counts)
    buffered = strategy != "no_buffer" and (row is None or row.extra_buffer)
    if strategy == "extra_buffer" and not buffered:
        raise ConfigError(f"SGLang has no extra_buffer for {model.name}, leave out --strategy: {strategy}")
    step = 0 if row is not None and row.saves is Saves.TAIL else _step(model)
    grid = model.chunk_tokens if model.layers else _GRID
    return Saving(grid if buffered else 1, step, buffered)


def of_log(settings: Mapping[str, Any]) -> Saving:
    """How the server of a request log saved states, by the first line of the log."""
    grid = settings["grid"]
    if not settings["page"]:  # a server that the simulator cannot play said no more than its grid
        return Saving(grid, buffered=grid > 1)
    track = settings["track_tokens"] or _TRACK_TOKENS
    return Saving(grid, settings["step"], settings["buffers"] > 0, track, settings["page"])


def _step(model: ModelSpec) -> int:
    """Tokens between the states that a pass has: Mamba-2 kernels give those of their chunks, others any."""
    return model.chunk_tokens if "mamba2" in model.layer_counts else 1
