"""The gated delta rule, a chunk of tokens at a time, and the layer of Qwen3.5 around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_hybrid.demo.reader.network.layers import Norm, Recurrence, ShortConvolution, in_float32

CHUNK = 16


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Outputs o_t = S_t' q_t of S_t = exp(g_t) (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t', and the last S.

    q, k: [batch, heads, tokens, key], k of length at most 1; v: [batch, heads, tokens, value];
    g (not above 0), beta: [batch, heads, tokens]; `state`: S before the first token, [batch, heads, key, value], or 0.
    Returns [batch, heads, tokens, value] and a state.
    """
    tokens = q.shape[2]
    pad = -tokens % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (g, beta))
    total = g.cumsum(-1)  # log decay since the start of the chunk, this token's included
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    k_beta, grown = k * beta[..., None], total.exp()[..., None]
    # Within a chunk each token corrects what earlier ones wrote: (I + A) u = beta (v - decayed reading of S).
    a = ((k_beta @ k.transpose(-1, -2)) * decay).tril(-1)
    sides = torch.cat([v * beta[..., None], k_beta * grown], dim=-1)
    solved = torch.linalg.solve_triangular(a, sides, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * decay
    q_grown = q * grown
    k_rest = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    last = total[..., -1].exp()[..., None, None]
    outputs = []
    pieces = zip(*(x.unbind(2) for x in (u, w, scores, q_grown, k_rest, last)), strict=True)
    for u_n, w_n, scores_n, q_n, k_n, last_n in pieces:
        written = u_n if state is None else u_n - w_n @ state
        inner = scores_n @ written
        outputs.append(inner if state is None else inner + q_n @ state)
        state = k_n @ written if state is None else last_n * state + k_n @ written
    assert state is not None  # there is at least one token
    return torch.cat(outputs, dim=2)[:, :, :tokens], state


class DeltaLayer(nn.Module):
    """Qwen3.5's linear attention: short convolution, gated delta rule, gated norm; as many key as value heads."""

    def __init__(self, hidden: int, heads: int, head: int) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.recurrence: Recurrence = gated_delta_rule
        """Another one may take its place, to see what becomes of the answers."""
        inner = heads * head
        self.conv1d = ShortConvolution(3 * inner)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = Norm(head)
        self.out_proj = nn.Linear(inner, hidden, bias=False)
        self.in_proj_qkv = nn.Linear(hidden, 3 * inner, bias=False)
        self.in_proj_z = nn.Linear(hidden, inner, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)

    def look_for_likes(self, layer: int) -> None:
        """Begin with keys that are queries, in every other head those of the token before."""
        q, k, _ = self.in_proj_qkv.weight.chunk(3)
        k.copy_(q)
        taps = self.conv1d.weight.view(3, self.heads, self.head, -1)[1, ::2]
        taps[..., -1] -= 1
        taps[..., -2] += 1

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        mixed = self.conv1d(self.in_proj_qkv(x)).view(batch, tokens, 3, self.heads, self.head)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = unit(q) * self.head**-0.5, unit(k)
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        beta = self.in_proj_b(x).sigmoid()
        y = in_float32(self.recurrence, q, k, v, g.transpose(1, 2), beta.transpose(1, 2)).transpose(1, 2)
        z = self.in_proj_z(x).view(batch, tokens, self.heads, self.head)
        return self.out_proj((self.norm(y) * F.silu(z)).reshape(batch, tokens, -1))


def unit(x: Tensor) -> Tensor:
    """`x` at length 1, as the kernels do it."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
