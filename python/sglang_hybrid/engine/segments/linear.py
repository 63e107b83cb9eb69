"""The linear layers of a batch with composed prompts: rows over jumped segments, and segments that are made.

A segment is made by itself, from a zero state: its transition and end state over the interior go into its entry, and
only then do the rows run, which may jump over it in the same pass (HYPIC, sections 4.2 and 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.passes.convolution import in_sizes
from sglang_hybrid.engine.segments import stages
from sglang_hybrid.engine.segments.batch import PassBatch
from sglang_hybrid.engine.segments.operators import Operators
from sglang_hybrid.engine.segments.store import Layer


@dataclass(frozen=True, slots=True)
class Pools:
    """One layer's states in SGLang's pools: `window` [slots, channels, tokens], `temporal` [slots, heads, V, K].

    Kimi delta attention keeps its windows the other way round; `window` is a view of them then."""

    window: Tensor
    temporal: Tensor


class LinearPass:
    """The linear layers of one batch; `slots` are where its checkpoints go ([n], in the order of `batch.saves`), and
    `operators` where the operators of segments go that it makes."""

    def __init__(
        self, batch: PassBatch, slots: Tensor | None, device: torch.device, operators: Operators | None
    ) -> None:
        self.batch, self._operators = batch, operators
        self.chunks = stages.Chunks(tuple(batch.linear.host_bounds), batch.linear.chunk, device)
        self._slots = slots

    def delta(self, module: Any, kept: Layer, pools: Pools, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """A gated delta rule: inputs [tokens of the stream, ...] of SGLang's RadixLinearAttention `module`.

        Returns [linear tokens, heads, V] in the dtype of `mixed`.
        """
        from sglang.srt.layers.attention.linear import gdn_backend

        tokens = self.batch.linear.tokens
        before, a, b = mixed[tokens], a[tokens], b[tokens]
        after = self._convolved("delta", before, module, kept, pools)
        q, k, v = after.split([module.q_dim, module.k_dim, module.v_dim], -1)
        q = q.unflatten(-1, (module.num_q_heads, -1)).float()
        k = k.unflatten(-1, (module.num_k_heads, -1)).float()
        v = v.unflatten(-1, (module.num_v_heads, -1)).float()
        g, beta = gdn_backend.fused_gdn_gating(module.A_log, a, b, module.dt_bias)
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
        return self._run(kept, pools, q, k, v, g[0].float(), beta[0].float()).to(mixed.dtype)

    def kimi(self, module: Any, kept: Layer, pools: Pools, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Kimi delta attention: like `delta`, with a gate by channel, a [1, tokens, heads, K] and b [1, tokens, heads].

        The gate may be flat, [1, tokens, heads * K].
        """
        from sglang_hybrid_kernels.gates import log_decay

        tokens = self.batch.linear.tokens
        before, strength = mixed[tokens], b[0][tokens].float()
        if compat.is_raw_strength(a):
            strength = strength.sigmoid()
        if a.dim() == 3:
            a = a.unflatten(-1, (module.num_k_heads, -1))
        after = self._convolved("kimi", before, module, kept, pools)
        parts = after.split([module.q_dim, module.k_dim, module.v_dim], -1)
        q, k, v = (x.unflatten(-1, (module.num_v_heads, -1)).float() for x in parts)
        g = log_decay(a[0][tokens], module.A_log, module.dt_bias, module.lower_bound)
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
        return self._run(kept, pools, q, k, v, g, strength).to(mixed.dtype)

    def mamba2(self, mixer: Any, kept: Layer, pools: Pools, hidden: Tensor, mup: Tensor | None) -> Tensor:
        """A whole Mamba-2 mixer of SGLang over `hidden` [linear tokens, hidden size]."""
        ranks = mixer.tp_size
        projected, _ = mixer.in_proj(hidden)
        if mup is not None:
            projected = projected * mup
        inner, state = mixer.intermediate_size // ranks, mixer.groups_ssm_state_size // ranks
        gate, before, dt = projected.split([inner, mixer.conv_dim // ranks, mixer.num_heads // ranks], -1)
        after = self._convolved("mamba2", before, mixer, kept, pools)
        x, b, c = after.float().split([inner, state, state], -1)
        x = x.unflatten(-1, (mixer.num_heads // ranks, -1))
        b, c = (each.unflatten(-1, (mixer.n_groups // ranks, -1)) for each in (b, c))
        dt = F.softplus(dt.float() + mixer.dt_bias.float())
        y = self._run(kept, pools, c, b, x * dt.unsqueeze(-1), dt * mixer.A.float(), None)
        y = (y + x * mixer.D.float().unsqueeze(-1)).flatten(1).to(hidden.dtype)
        out, _ = mixer.out_proj(mixer.norm(y, gate))
        return torch.as_tensor(out)

    def _convolved(self, family: str, x: Tensor, module: Any, kept: Layer, pools: Pools) -> Tensor:
        """The short convolution of `x` [linear tokens, channels] and its activation, each row behind what it follows.

        Leaves the windows of requests, segments and checkpoints behind.
        """
        linear, making, saves = self.batch.linear, self.batch.making, self.batch.saves
        if making is not None:  # what a tail of this very pass looks back on
            kept.window[making.blocks] = x[making.windows].mT.to(kept.window.dtype)
        behind, after = linear.behind, linear.after
        windows = kept.window[behind.clamp(min=0)]
        own = pools.window[after.clamp(min=0)]
        windows = torch.where((behind >= 0)[:, None, None], windows, own).contiguous()
        windows = windows.masked_fill_((behind.clamp(min=-1) + after.clamp(min=-1) == -2)[:, None, None], 0)
        out = convolved(convolution(family), module, x, windows, linear.wide.int(), linear.wide_lengths)
        pools.window[linear.last_states] = windows[linear.last]
        if saves is not None and self._slots is not None:
            inside = saves.windows.shape[0]
            pools.window[self._slots[:inside]] = x[saves.windows].mT.to(pools.window.dtype)
            pools.window[self._slots[inside:]] = pools.window[saves.finals]
        return out

    def _run(
        self, kept: Layer, pools: Pools, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
    ) -> Tensor:
        """The recurrence over all rows, in float32, some heads after the other: [linear tokens, heads, V].

        Updates the states.
        """
        from sglang_hybrid_kernels.chunk_h_jump import chunk_h_jump

        linear, making, saves = self.batch.linear, self.batch.making, self.batch.saves
        if making is not None and self._operators is not None:
            at = making.interior
            self._operators.store(kept, k[at], v[at], g[at], None if beta is None else beta[at])
        out = torch.empty_like(v)
        for some, keys in stages.turns(self.chunks, k.shape[1], *pools.temporal.shape[1:]):
            part, states = kept.heads(some), pools.temporal[:, some]
            strength = None if beta is None else beta[:, some]
            cut = stages.before(self.chunks, q[:, keys], k[:, keys], v[:, some], g[:, some], strength)
            h, v_new = chunk_h_jump(
                cut.k, cut.w, cut.u, cut.g, states, linear.states, linear.bounds, linear.of_request, linear.jump,
                part.transition, part.end_state, transition_scale=part.transition_scale,
                end_state_scale=part.end_state_scale, transition_rows=part.transition_rows, chunk_size=linear.chunk,
                check_slots=False,
            )  # fmt: skip
            h = h[: self.chunks.count]
            if saves is not None and self._slots is not None:
                inside = saves.chunks.numel()
                states[self._slots[:inside]] = h[saves.chunks].to(states.dtype)
                states[self._slots[inside:]] = states[saves.finals]
            out[:, some] = stages.behind(self.chunks, cut, h, v_new)
        return out


def convolution(family: str) -> Any:
    """SGLang's convolution of prefills with layers of a `family`, a method of `LinearPass`."""
    if family == "mamba2":
        from sglang.srt.layers.attention.mamba import mamba

        return mamba.causal_conv1d_fn
    if family == "kimi":
        from sglang.srt.layers.attention.linear import kda_backend

        return kda_backend.causal_conv1d_fn
    from sglang.srt.layers.attention.linear import gdn_backend

    return gdn_backend.causal_conv1d_fn


def convolved(convolve: Any, module: Any, x: Tensor, windows: Tensor, bounds: Tensor, lengths: list[int]) -> Tensor:
    """x [tokens, channels] in rows of `lengths`, which begin at `bounds`, each behind one of `windows`, which then are
    those at the ends of the rows."""
    weight, bias = weights(module)
    rows = torch.arange(len(lengths), device=x.device, dtype=torch.int32)
    out = in_sizes(
        convolve,
        x.mT,
        weight,
        bias,
        activation=module.activation,
        conv_states=windows,
        has_initial_state=torch.ones_like(rows, dtype=torch.bool),
        cache_indices=rows,
        query_start_loc=bounds,
        seq_lens_cpu=lengths,
    )
    return torch.as_tensor(out).mT[: x.shape[0]]


def weights(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [channels, width] and bias of a module's short convolution."""
    if hasattr(module, "conv_weights"):
        return module.conv_weights, module.bias
    weight = module.conv1d.weight
    return weight.view(weight.size(0), weight.size(2)), module.conv1d.bias


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
