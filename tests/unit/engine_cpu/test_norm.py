"""Gated norms in both orders against float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sglang_hybrid.engine.cpu import norm


def reference(x, weight, bias, z, eps, group, before, rms, activation):
    x, weight = x.double(), weight.double()
    gate = 1.0 if z is None else (z.double().sigmoid() if activation == "sigmoid" else F.silu(z.double()))
    y = x if before else x * gate
    groups = []
    for part in y.split(group or y.shape[-1], dim=-1):
        centred = part if rms else part - part.mean(-1, keepdim=True)
        groups.append(centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt())
    y = torch.cat(groups, -1) * weight + (0.0 if bias is None else bias.double())
    return y * gate if before else y


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (True, True), (False, False)])
def test_both_orders_and_all_variants(group, before, rms, activation, gated, biased, rng):
    x, z = (torch.randn(5, 3, 24, generator=rng) for _ in range(2))
    weight, bias = (torch.randn(24, generator=rng) for _ in range(2))
    z, bias = z if gated else None, bias if biased else None
    given = [t.clone() for t in (x, weight)]
    got = norm.rms_norm_gated(x=x, weight=weight, bias=bias, z=z, eps=1e-5, group_size=group, norm_before_gate=before,
                              is_rms_norm=rms, activation=activation)  # fmt: skip
    want = reference(x, weight, bias, z, 1e-5, group, before, rms, activation)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, given[0])
    assert torch.equal(weight, given[1])


def test_a_gate_with_heads_as_a_dimension(rng):
    x, z = torch.randn(6, 8, generator=rng), torch.randn(2, 3, 8, generator=rng)
    got = norm.rms_norm_gated(x=x, weight=torch.ones(8), bias=None, z=z, is_rms_norm=True)
    flat = norm.rms_norm_gated(x=x, weight=torch.ones(8), bias=None, z=z.view(6, 8), is_rms_norm=True)
    assert torch.equal(got, flat)


def layer(rng, dtype):
    return SimpleNamespace(weight=torch.randn(16, generator=rng).to(dtype), bias=None, eps=1e-6, activation="silu")


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_the_layers_forward(dtype, rtol, rng):
    x, g = (torch.randn(7, 16, generator=rng).to(dtype) for _ in range(2))
    self = layer(rng, dtype)
    got = norm.fused_rms_norm_gated_forward(self, x, g)
    assert got.dtype == dtype
    want = reference(x, self.weight, None, g, 1e-6, None, True, True, "silu")
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=rtol)


def test_a_residual_is_refused(rng):
    x = torch.zeros(1, 16)
    with pytest.raises(NotImplementedError, match="residual"):
        norm.fused_rms_norm_gated_forward(layer(rng, torch.float32), x, x, residual=x)
