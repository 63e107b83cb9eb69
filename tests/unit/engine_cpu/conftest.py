"""Sequential float64 references, one token at a time, straight from the recurrences' definitions."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F


def _l2norm(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gated_delta_rule(q, k, v, g, beta, state):
    """One sequence: q, k [T, HK, K], v [T, HV, V], beta [T, HV], state [HV, V, K]; g [T, HV] or [T, HV, K].

    Returns the output and the states [T + 1, ...].
    """
    rep = v.shape[1] // q.shape[1]
    q, k = (_l2norm(x.double()).repeat_interleave(rep, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    states, outputs = [state.double()], []
    for t in range(v.shape[0]):
        kept = g[t].double().exp()
        s = states[-1] * (kept[:, None] if kept.dim() == 2 else kept[:, None, None])
        error = v[t].double() - torch.einsum("hvk,hk->hv", s, k[t])
        s = s + torch.einsum("hv,hk->hvk", error * beta[t].double()[:, None], k[t])
        states.append(s)
        outputs.append(torch.einsum("hvk,hk->hv", s, q[t]))
    return (torch.stack(outputs) if outputs else v.double()), torch.stack(states)


def gating(A_log, a, b, dt_bias):
    return -A_log.double().exp() * F.softplus(a.double() + dt_bias.double()), b.double().sigmoid()


def causal_conv(x, weight, bias, past, silu=True):
    """One sequence: x [channels, T], weight [channels, width], past [channels, width - 1] -> output, new past."""
    window = torch.cat([past.double(), x.double()], 1)
    width = weight.shape[1]
    y = torch.stack([(window[:, t : t + width] * weight.double()).sum(1) for t in range(x.shape[1])], 1)
    y = y if bias is None else y + bias.double()[:, None]
    return (F.silu(y) if silu else y), window[:, window.shape[1] - (width - 1) :]


def mamba2(x, dt, A, B, C, D, state):
    """One sequence: x [T, H, P], dt [T, H] after softplus, A [H], B, C [T, G, N], state [H, P, N]."""
    rep = x.shape[1] // B.shape[1]
    b, c = (t.double().repeat_interleave(rep, 1) for t in (B, C))
    states, outputs = [state.double()], []
    for t in range(x.shape[0]):
        step = dt[t].double()
        kept = (step * A.double()).exp()[:, None, None]
        added = torch.einsum("hp,hn->hpn", x[t].double() * step[:, None], b[t])
        states.append(states[-1] * kept + added)
        outputs.append(torch.einsum("hpn,hn->hp", states[-1], c[t]) + D.double()[:, None] * x[t].double())
    return (torch.stack(outputs) if outputs else x.double()), torch.stack(states)


@pytest.fixture(scope="session")
def naive():
    """The references of this file."""
    return SimpleNamespace(gated_delta_rule=gated_delta_rule, gating=gating, causal_conv=causal_conv, mamba2=mamba2)


@pytest.fixture
def interpreted():
    """The last line that a module prints which runs in a process of its own, under Triton's interpreter."""

    def run(module):
        mode = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        mode |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", module], env={**os.environ, **mode}, capture_output=True, text=True, timeout=1800,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run


@pytest.fixture
def rng():
    """A seeded generator."""
    return torch.Generator().manual_seed(20)
