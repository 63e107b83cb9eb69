"""The small fused operations against the steps they fuse."""

import pytest
import torch

from sglang_hybrid.engine.cpu import fused

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)]


def gemma(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_sigmoid_gate(dtype, rtol, rng):
    x, gate = torch.randn(5, 12, generator=rng).to(dtype), torch.randn(5, 3, 8, generator=rng).to(dtype)[..., 4:]
    want = x.double() * gate.reshape(5, 12).double().sigmoid()
    other = fused.fused_sigmoid_mul(x, gate, inplace=False)
    torch.testing.assert_close(other.double(), want, atol=1e-6, rtol=rtol)
    assert not torch.equal(other, x)
    assert fused.fused_sigmoid_mul(x, gate) is x
    assert torch.equal(x, other)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_query_and_key_norms_with_and_without_gate(dtype, rtol, rng):
    tokens, heads, kv_heads, dim = 4, 3, 2, 8
    packed = torch.randn(tokens, heads * 2 * dim + kv_heads * dim, generator=rng).to(dtype)
    q_gate, k = packed.split([heads * 2 * dim, kv_heads * dim], -1)  # strided, as SGLang passes them
    wq, wk = (torch.randn(dim, generator=rng).to(dtype) for _ in range(2))
    q, k_out, gate = fused.fused_qk_gemma_rmsnorm_with_gate(q_gate, k, wq, wk, 1e-6, dim, heads)
    by_head = q_gate.reshape(tokens, heads, 2, dim)
    want_q = gemma(by_head[:, :, 0], wq, 1e-6).reshape(-1, dim)
    want_k = gemma(k.reshape(-1, dim), wk, 1e-6)
    torch.testing.assert_close(q.double(), want_q, atol=1e-5, rtol=rtol)
    torch.testing.assert_close(k_out.double(), want_k, atol=1e-5, rtol=rtol)
    assert torch.equal(gate, by_head[:, :, 1].reshape(-1, dim))
    assert gate.is_contiguous()
    plain = fused.fused_qk_gemma_rmsnorm(by_head[:, :, 0].reshape(tokens, -1), k, wq, wk, 1e-6, dim)
    assert torch.equal(plain[0], q)
    assert torch.equal(plain[1], k_out)


def test_split_of_the_input_projections():
    hk, hv, dk, dv = 2, 4, 3, 5
    qkvz = torch.arange(2 * (2 * hk * dk + 2 * hv * dv)).view(2, -1)
    ba = torch.arange(2 * 2 * hv).view(2, -1)
    qkv, z, b, a = fused.fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, hk, hv, dk, dv)
    cut = 2 * hk * dk + hv * dv
    assert torch.equal(qkv, qkvz[:, :cut])
    assert torch.equal(z, qkvz[:, cut:].view(2, hv, dv))
    assert torch.equal(torch.cat([b, a], 1), ba)
    assert all(t.is_contiguous() for t in (qkv, z, b, a))


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_shared_expert_gate(dtype, rtol, rng):
    hidden, shared, final = (torch.randn(3, 6, generator=rng).to(dtype) for _ in range(3))
    weight = torch.randn(6, generator=rng).to(dtype)
    want = final.double() + (hidden.double() @ weight.double()).sigmoid()[:, None] * shared.double()
    assert fused.fused_gate_sigmoid_mul_add(hidden, weight, shared, final) is None
    torch.testing.assert_close(final.double(), want, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=rtol)
