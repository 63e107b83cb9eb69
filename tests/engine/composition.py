"""Composed prefill by its definition, over whole sequences: what a server's answers over segments are held against.

Each segment is run by itself. Then the prompt is run layer by layer, the inputs of interiors being those of the
isolated runs. Nothing is cached, copied, turned or jumped over: a recurrence that runs over an interior token by token
has the state that its transition and end state give, and keys of isolated inputs, made at a position of the prompt, are
the turned ones. Only the short convolutions need care: an interior's own outputs come from its isolated run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sglang_hybrid.demo.reader import weights
from sglang_hybrid.segment.geometry import Range, Seams

WINDOW = 3
"""Tokens that a convolution of the readers looks back on."""


Isolated = tuple[Range, list[Tensor], list[Tensor]]
"""Where a segment's interior lies, its inputs of every layer, and what every convolution gave there."""


class _Spliced(nn.Module):
    """A short convolution that keeps its outputs, or takes those of some tokens from elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.given: Tensor | None = None
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.given is not None:
            known = ~self.given.isnan()
            y = torch.where(known, self.given, y)
        self.kept = y
        return y  # type: ignore[no-any-return]


class Composition:
    """One of the readers (`demo.reader`), in float32, with seams of `width` tokens."""

    def __init__(self, model: str, width: int = 8) -> None:
        self.network = weights.network(model)
        self.seams = Seams(width, WINDOW)
        self._layers: list[Any] = list(self.network.model.layers)
        self._spliced: list[_Spliced | None] = []
        for layer in self._layers:
            mixer = getattr(layer, "linear_attn", None) or getattr(layer, "mamba", None)
            if mixer is not None:
                mixer.conv1d = _Spliced(mixer.conv1d)
            self._spliced.append(None if mixer is None else mixer.conv1d)

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], segments: Sequence[Range]) -> Tensor:
        """Log-probabilities of each token of `output`, greedy or not, behind `prompt` with these segments reused."""
        return self.distributions(prompt, output, segments).gather(1, torch.tensor(list(output))[:, None])[:, 0]

    @torch.no_grad()
    def distributions(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        segments: Sequence[Range],
        taken: list[Isolated] | None = None,
    ) -> Tensor:
        """Log-probabilities of all that could stand in place of each token of `output`, [len(output), vocabulary].

        `taken`: what `isolated` gave for these tokens, if it is known.
        """
        ids = torch.tensor([[*prompt, *output]])
        x = self.network.model.embed_tokens(ids)
        taken = self.isolated([*prompt, *output], segments) if taken is None else taken
        for number, layer in enumerate(self._layers):
            for (low, high), inputs, _ in taken:
                x[:, low:high] = inputs[number]
            spliced = self._spliced[number]
            if spliced is not None:
                spliced.given = None
                if taken:
                    width = taken[0][2][number].shape[-1]
                    spliced.given = torch.full((1, ids.shape[1], width), torch.nan)
                    for (low, high), _, outputs in taken:
                        spliced.given[:, low:high] = outputs[number]
            x = layer(x)
        x = self.network.model.get_submodule(self.network.model.last_norm)(x)
        rows = x[0, len(prompt) - 1 : -1]
        return torch.nn.functional.linear(rows, self.network.model.embed_tokens.weight).log_softmax(-1)

    @torch.no_grad()
    def isolated(self, tokens: Sequence[int], segments: Sequence[Range], front: int = 0) -> list[Isolated]:
        """What each segment of `tokens` gives by itself, or behind the first `front` tokens."""
        found = []
        for start, end in segments:
            low, high = self.seams.interior((start, end))
            ids = torch.tensor([[*tokens[:front], *tokens[start:end]]])
            x, inputs, outputs = self.network.model.embed_tokens(ids), [], []
            inside = slice(front + low - start, front + high - start)
            for number, layer in enumerate(self._layers):
                inputs.append(x[:, inside].clone())
                spliced = self._spliced[number]
                if spliced is not None:
                    spliced.given = None
                x = layer(x)
                kept = x[:, :0] if spliced is None or spliced.kept is None else spliced.kept
                outputs.append(kept[:, inside].clone())
            found.append(((low, high), inputs, outputs))
        return found
