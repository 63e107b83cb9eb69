"""The CPU kernels of Gated DeltaNet against the PyTorch code in Hugging Face transformers (Qwen3-Next)."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from sglang_hybrid.engine.cpu import gdn, norm
from sglang_hybrid.engine.cpu.causal_conv import causal_conv1d_fn, causal_conv1d_update

HK, HV, K, V = 2, 4, 16, 32


@pytest.fixture
def rng():
    torch.manual_seed(7)
    return torch.Generator().manual_seed(7)


def draw(rng, tokens):
    q, k = (torch.randn(1, tokens, HK, K, generator=rng) for _ in range(2))
    v = torch.randn(1, tokens, HV, V, generator=rng)
    g, beta = -torch.rand(1, tokens, HV, generator=rng), torch.rand(1, tokens, HV, generator=rng)
    return q, k, v, g, beta


def as_hf(q, k, v, g, beta):
    """transformers repeats key heads outside of its kernels."""
    return *(x.repeat_interleave(HV // HK, 2) for x in (q, k)), v, g, beta


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunked_rule(tokens, rng):
    x = draw(rng, tokens)
    state = torch.randn(1, HV, V, K, generator=rng)
    want, want_state = hf.torch_chunk_gated_delta_rule(
        *as_hf(*x), initial_state=state.mT, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out, _, _ = gdn.chunk_gated_delta_rule(*x, initial_state=state, cu_seqlens=torch.tensor([0, tokens]))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, want_state.mT, atol=1e-5, rtol=1e-4)


def test_recurrent_rule(rng):
    q, k, v, _, _ = draw(rng, 1)
    a, b = (torch.randn(1, HV, generator=rng) for _ in range(2))
    A_log, dt_bias = (torch.randn(HV, generator=rng) for _ in range(2))
    state = torch.randn(1, HV, V, K, generator=rng)
    g = (-A_log.exp() * F.softplus(a + dt_bias)).unsqueeze(0)
    want, want_state = hf.torch_recurrent_gated_delta_rule(
        *as_hf(q, k, v, g, b.sigmoid().unsqueeze(0)), state.mT, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out = gdn.recurrent_gated_delta_rule(A_log, dt_bias, q, k, v, a, b, state, torch.tensor([0]))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, want_state.mT, atol=1e-5, rtol=1e-4)


def test_convolution_update(rng):
    x, weight = torch.randn(3, 10, generator=rng), torch.randn(10, 4, generator=rng)
    state = torch.randn(3, 10, 3, generator=rng)
    theirs = state.clone()
    update = getattr(hf, "torch_causal_conv1d_update", None) or hf.causal_conv1d_update  # transformers 5.19
    want = update(x.unsqueeze(-1), theirs, weight, activation="silu").squeeze(-1)
    out = causal_conv1d_update(x, state, weight, None, "silu", conv_state_indices=torch.arange(3))
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(state, theirs)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_gated_norm(dtype, rtol, rng):
    layer = hf.Qwen3NextRMSNormGated(24).to(dtype)
    layer.weight.data = torch.randn(24, generator=rng).to(dtype)
    x, gate = (torch.randn(9, 24, generator=rng).to(dtype) for _ in range(2))
    got = norm.rms_norm_gated(x=x, weight=layer.weight.data, bias=None, z=gate, eps=1e-6, is_rms_norm=True)
    torch.testing.assert_close(got, layer(x, gate).data, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("decoded", [0, 5])
def test_whole_layer(decoded, rng):
    """One prefill of 70 tokens, or 65 and five decoded tokens, through a layer with transformers' weights."""
    config = Qwen3NextConfig(
        hidden_size=48, linear_num_key_heads=HK, linear_num_value_heads=HV, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=4,
    )  # fmt: skip
    layer = hf.Qwen3NextGatedDeltaNet(config, 0).float().eval()
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng) * 0.3
    hidden = torch.randn(1, 70, 48, generator=rng)
    with torch.no_grad():
        want = layer(hidden)
        got = ours(layer, hidden, 70 - decoded)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def ours(layer, hidden, prefilled):
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)[0]
    a, b = a[0], b[0]
    conv, state = torch.zeros(1, mixed.shape[1], 3), torch.zeros(1, HV, V, K)
    weight, bounds, slot = layer.conv1d.weight.squeeze(1), torch.tensor([0, prefilled]), torch.tensor([0])
    first = causal_conv1d_fn(
        mixed[:prefilled].mT, weight, None, conv, bounds, None, slot, torch.tensor([False])
    ).mT  # fmt: skip
    g, beta = gdn.gating(layer.A_log, a[:prefilled], b[:prefilled], layer.dt_bias)
    outputs = [gdn.chunk_gated_delta_rule(*heads(first), g, beta, state, bounds)[0]]
    for t in range(prefilled, hidden.shape[1]):
        now = slice(t, t + 1)
        step = causal_conv1d_update(mixed[now], conv, weight, None, "silu", conv_state_indices=slot)
        outputs.append(
            gdn.recurrent_gated_delta_rule(layer.A_log, layer.dt_bias, *heads(step), a[now], b[now], state, slot)
        )
    core = torch.cat(outputs, 1)
    eps = layer.norm.variance_epsilon
    normed = norm.rms_norm_gated(x=core, weight=layer.norm.weight, bias=None, z=z, eps=eps, is_rms_norm=True)
    return layer.out_proj(normed.flatten(2))


def heads(mixed):
    q, k, v = mixed.split([HK * K, HK * K, HV * V], -1)
    return q.view(1, -1, HK, K), k.view(1, -1, HK, K), v.view(1, -1, HV, V)
