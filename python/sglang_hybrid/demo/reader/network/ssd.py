"""The recurrence of Mamba-2, a chunk of tokens at a time, and the mixer of Falcon-H1 around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_hybrid.demo.reader.network.layers import Recurrence, ShortConvolution, in_float32

CHUNK = 16


def state_space(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Outputs y_t = S_t' c_t of S_t = exp(g_t) S_{t-1} + b_t x_t', and the last S; heads share b and c.

    x: [batch, heads, tokens, value]; b, c: [batch, 1, tokens, state]; g (not above 0): [batch, heads, tokens];
    `state`: S before the first token, [batch, heads, state, value], or 0. Returns [batch, heads, tokens, value] and a
    state.
    """
    tokens = x.shape[2]
    pad = -tokens % chunk
    x, b, c = (F.pad(t, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for t in (x, b, c))
    total = F.pad(g, (0, pad)).unflatten(2, (-1, chunk)).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    y = ((c @ b.transpose(-1, -2)) * decay) @ x
    weighted = x * (total[..., -1:] - total).exp()[..., None]
    added = b.transpose(-1, -2) @ weighted  # what each chunk leaves in the state
    last = total[..., -1].exp()[..., None, None]
    state = torch.zeros_like(added[:, :, 0]) if state is None else state
    states = []
    for added_n, last_n in zip(added.unbind(2), last.unbind(2), strict=True):
        states.append(state)
        state = last_n * state + added_n
    y = y + (c @ torch.stack(states, dim=2)) * total.exp()[..., None]
    return y.flatten(2, 3)[:, :, :tokens], state


class SsdLayer(nn.Module):
    """Falcon-H1's mixer with one group, no inner norm and multipliers of 1."""

    def __init__(self, hidden: int, inner: int, heads: int, state: int) -> None:
        super().__init__()
        self.inner, self.heads, self.state = inner, heads, state
        self.recurrence: Recurrence = state_space
        """Another one may take its place, to see what becomes of the answers."""
        self.conv1d = ShortConvolution(inner + 2 * state, bias=True)
        self.in_proj = nn.Linear(hidden, 2 * inner + 2 * state + heads, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def look_for_likes(self, layer: int) -> None:
        """Begin with b as c, in every other layer that of the token before: all heads share them."""
        b, c = self.in_proj.weight[2 * self.inner : -self.heads].chunk(2)
        b.copy_(c)
        if layer % 4 == 0:
            taps = self.conv1d.weight[self.inner : self.inner + self.state, 0]
            taps[:, -1] -= 1
            taps[:, -2] += 1

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        gate, mixed, step = self.in_proj(x).split([self.inner, self.inner + 2 * self.state, self.heads], dim=-1)
        value, b, c = self.conv1d(mixed).split([self.inner, self.state, self.state], dim=-1)
        value = value.view(batch, tokens, self.heads, -1).transpose(1, 2)
        step = F.softplus(step + self.dt_bias).transpose(1, 2)
        g = -self.A_log.exp()[:, None] * step
        y = (
            in_float32(self.recurrence, value * step[..., None], b[:, None], c[:, None], g)
            + value * self.D[:, None, None]
        )
        y = y.transpose(1, 2).reshape(batch, tokens, -1)
        return self.out_proj(y * F.silu(gate))
