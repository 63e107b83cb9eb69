"""Composed prefill by its definition, over whole sequences: what a server's answers over segments are held against.

Each segment is run by itself. Then the prompt is run layer by layer, the inputs of interiors being those of the
isolated runs. Nothing is cached, copied, turned or jumped over: a recurrence that runs over an interior token by token
has the state that its transition and end state give, and keys of isolated inputs, made at a position of the prompt, are
the turned ones. Only the short convolutions need care: an interior's own outputs come from its isolated run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_hybrid.demo import kimi
from sglang_hybrid.demo.reader import weights
from sglang_hybrid.segment.geometry import Range, Seams

WINDOW = 3
"""Tokens that a convolution of these models looks back on."""


Isolated = tuple[Range, list[Tensor], list[list[Tensor]]]
"""Where a segment's interior lies, its inputs of every layer and its output, and what its convolutions gave there."""


class _Spliced(nn.Module):
    """A short convolution that keeps its outputs [tokens, channels], or takes those of some tokens from elsewhere."""

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
        self.kept = y.flatten(0, -2)
        return y  # type: ignore[no-any-return]


_CONVOLUTIONS = ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d")


class _Batched(nn.Module):
    """A layer over [tokens, hidden size] as one over a batch of one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[0])[None]  # type: ignore[no-any-return]


class Composition:
    """One of the readers (`demo.reader`), or Kimi-Linear in a folder, in float32, with seams of `width` tokens."""

    def __init__(self, model: str | Path, width: int = 8) -> None:
        if isinstance(model, Path):
            self.network: Any = kimi.KimiLinear.from_pretrained(model)
            self.last_norm, self.head = self.network.model.norm, self.network.lm_head.weight
        else:
            self.network = weights.network(model)
            self.last_norm = self.network.model.get_submodule(self.network.model.last_norm)
            self.head = self.network.model.embed_tokens.weight
        self.seams = Seams(width, WINDOW)
        self._spliced: list[list[_Spliced]] = []
        for layer in self.network.model.layers:
            found = []
            for mixer in (getattr(layer, name, None) for name in ("linear_attn", "mamba", "self_attn")):
                for name in _CONVOLUTIONS:
                    if hasattr(mixer, name):
                        found.append(_Spliced(getattr(mixer, name)))
                        setattr(mixer, name, found[-1])
            self._spliced.append(found)
        layers = self.network.model.layers
        self._layers: list[Any] = [_Batched(layer) for layer in layers] if isinstance(model, Path) else list(layers)

    def logprobs(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        segments: Sequence[Range],
        states: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities of each token of `output`, greedy or not, behind `prompt` with these segments reused.

        `states`: what `states` gives for both, if it is known.
        """
        if states is None:
            states = self.states([*prompt, *output], segments)
        return self._chances(states, len(prompt)).gather(1, torch.tensor(list(output))[:, None])[:, 0]

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
        return self._chances(self.states([*prompt, *output], segments, taken), len(prompt))

    @torch.no_grad()
    def _chances(self, states: Tensor, prompt: int) -> Tensor:
        return torch.nn.functional.linear(states[prompt - 1 : -1], self.head).log_softmax(-1)

    @torch.no_grad()
    def states(self, tokens: Sequence[int], segments: Sequence[Range], taken: list[Isolated] | None = None) -> Tensor:
        """What the output layer reads, [tokens, hidden size]; of interiors what their isolated runs gave."""
        ids = torch.tensor([list(tokens)])
        x = self.network.model.embed_tokens(ids)
        taken = self.isolated(tokens, segments) if taken is None else taken
        for number, layer in enumerate(self._layers):
            for (low, high), inputs, _ in taken:
                x[:, low:high] = inputs[number]
            for which, spliced in enumerate(self._spliced[number]):
                spliced.given = None
                if taken:
                    width = taken[0][2][number][which].shape[-1]
                    spliced.given = torch.full((ids.shape[1], width), torch.nan)
                    for (low, high), _, outputs in taken:
                        spliced.given[low:high] = outputs[number][which]
            x = layer(x)
        for (low, high), inputs, _ in taken:
            x[:, low:high] = inputs[-1]
        return self.last_norm(x)[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def isolated(self, tokens: Sequence[int], segments: Sequence[Range], front: int = 0) -> list[Isolated]:
        """What each segment of `tokens` gives by itself, or behind the first `front` tokens."""
        found = []
        for start, end in segments:
            low, high = self.seams.interior((start, end))
            ids = torch.tensor([[*tokens[:front], *tokens[start:end]]])
            x, inputs, outputs = self.network.model.embed_tokens(ids), [], list[list[Tensor]]()
            inside = slice(front + low - start, front + high - start)
            for number, layer in enumerate(self._layers):
                inputs.append(x[:, inside].clone())
                for spliced in self._spliced[number]:
                    spliced.given = None
                x = layer(x)
                kept = [spliced.kept for spliced in self._spliced[number] if spliced.kept is not None]
                outputs.append([each[inside].clone() for each in kept])
            inputs.append(x[:, inside].clone())
            found.append(((low, high), inputs, outputs))
        return found
