"""The CPU kernels of Mamba-2 against the PyTorch mixers in Hugging Face transformers."""

import pytest
import torch
from transformers import BambaConfig, FalconH1Config, Mamba2Config, NemotronHConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, FalconH1RMSNormGated, compute_mup_vector
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from sglang_hybrid.engine.cpu import mamba2, norm
from sglang_hybrid.engine.cpu.causal_conv import causal_conv1d_fn, causal_conv1d_update

HIDDEN, H, P, G, N = 32, 8, 8, 2, 10


def falcon():
    config = FalconH1Config(
        hidden_size=HIDDEN, mamba_d_ssm=H * P, mamba_n_heads=H, mamba_d_head=P, mamba_n_groups=G, mamba_d_state=N,
        mamba_chunk_size=64, mamba_rms_norm=True, mamba_norm_before_gate=False,
        ssm_multipliers=[0.5, 0.7, 0.9, 1.1, 1.3], ssm_in_multiplier=0.8,
    )  # fmt: skip
    mixer = FalconH1Mixer(config, 0)
    mixer.register_buffer("mup_vector", compute_mup_vector(config))  # the model does this
    return mixer


def bamba():
    config = BambaConfig(
        hidden_size=HIDDEN, mamba_n_heads=H, mamba_d_head=P, mamba_n_groups=G, mamba_d_state=N, mamba_chunk_size=64
    )
    return BambaMixer(config, 0)


def plain():
    config = Mamba2Config(hidden_size=HIDDEN, num_heads=H, head_dim=P, n_groups=G, state_size=N, chunk_size=64)
    return Mamba2Mixer(config, 0)


def nemotron():
    """One chunk for all: over several, transformers 5.12 sums the states along the wrong axis."""
    config = NemotronHConfig(
        hidden_size=HIDDEN, mamba_num_heads=H, mamba_head_dim=P, n_groups=G, ssm_state_size=N, chunk_size=256
    )
    return NemotronHMamba2Mixer(config, 0)


MIXERS = {"falcon_h1": (falcon, G), "bamba": (bamba, 1), "mamba2": (plain, 1), "nemotron_h": (nemotron, G)}
"""name -> (mixer, groups over which its norm takes statistics)."""


@pytest.mark.parametrize("decoded", [0, 5])
@pytest.mark.parametrize("tokens", [6, 70, 130])
@pytest.mark.parametrize("name", MIXERS)
def test_whole_mixer(name, tokens, decoded):
    """One prefill, or a shorter one and five decoded tokens, with transformers' weights."""
    make, norm_groups = MIXERS[name]
    rng = torch.Generator().manual_seed(11)
    mixer = make().float().eval()
    for parameter in mixer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng) * 0.3
    hidden = torch.randn(1, tokens, HIDDEN, generator=rng)
    with torch.no_grad():
        want = getattr(mixer, "torch_forward", mixer)(hidden)  # transformers 5.19
        got = ours(mixer, hidden, tokens - decoded, norm_groups)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def ours(mixer, hidden, prefilled, norm_groups):
    projected = mixer.in_proj(hidden * getattr(mixer, "ssm_in_multiplier", 1.0)) * getattr(mixer, "mup_vector", 1.0)
    gate, mixed, dt = projected[0].split([H * P, H * P + 2 * G * N, H], -1)
    conv, states = torch.zeros(1, mixed.shape[1], mixer.conv1d.weight.shape[-1] - 1), torch.zeros(1, H, P, N)
    weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    A, bounds, slot = -mixer.A_log.float().exp(), torch.tensor([0, prefilled]), torch.tensor([0])
    out = torch.empty(1, hidden.shape[1], H, P)
    first = causal_conv1d_fn(
        mixed[:prefilled].mT, weight, bias, conv, bounds, None, slot, torch.tensor([False])
    ).mT  # fmt: skip
    x, b, c = heads(first)
    _, last, _ = mamba2.mamba_chunk_scan_combined(
        x, dt[None, :prefilled], A, b, c, 64, D=mixer.D, dt_bias=mixer.dt_bias, cu_seqlens=bounds, dt_softplus=True,
        out=out[:, :prefilled], return_varlen_states=True, return_track_states=True, state_dtype=torch.float32,
    )  # fmt: skip
    states.copy_(last)
    for t in range(prefilled, hidden.shape[1]):
        now = slice(t, t + 1)
        step = causal_conv1d_update(mixed[now], conv, weight, bias, "silu", conv_state_indices=slot)
        x, b, c = (t[0] for t in heads(step))
        mamba2.selective_state_update(
            states, x, dt[now, :, None].expand(1, H, P), A[:, None, None].expand(H, P, N), b, c,
            mixer.D[:, None].expand(H, P), dt_bias=mixer.dt_bias[:, None].expand(H, P), dt_softplus=True,
            state_batch_indices=slot, out=out[0, now],
        )  # fmt: skip
    normed = norm.rms_norm_gated(
        x=out.flatten(2)[0], weight=mixer.norm.weight, bias=None, z=gate, eps=mixer.norm.variance_epsilon,
        group_size=H * P // norm_groups, norm_before_gate=False, is_rms_norm=True,
    )  # fmt: skip
    return mixer.out_proj(normed).unsqueeze(0)


def heads(mixed):
    x, b, c = mixed.split([H * P, G * N, G * N], -1)
    return x.view(1, -1, H, P), b.view(1, -1, G, N), c.view(1, -1, G, N)


@pytest.mark.parametrize("before", [True, False])
def test_gated_norm_in_both_orders(before):
    rng = torch.Generator().manual_seed(3)
    layer = FalconH1RMSNormGated(24, n_groups=3, norm_before_gate=before)
    layer.weight.data = torch.randn(24, generator=rng)
    x, gate = (torch.randn(2, 5, 24, generator=rng) for _ in range(2))
    got = norm.rms_norm_gated(
        x=x, weight=layer.weight.data, bias=None, z=gate, eps=layer.variance_epsilon, group_size=8,
        norm_before_gate=before, is_rms_norm=True,
    )  # fmt: skip
    torch.testing.assert_close(got, layer(x, gate).data, atol=1e-5, rtol=1e-5)
