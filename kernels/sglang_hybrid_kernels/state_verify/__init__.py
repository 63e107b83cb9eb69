"""Speculative decoding on trees: outputs of all candidates, and the state after the accepted path.

SGLang serves the same purpose with `fused_sigmoid_gating_delta_rule_update` (GDN, KDA) and `selective_state_update`
(Mamba2), given `retrieve_parent_token` and a buffer that takes the whole state after every candidate; promotion is
`fused_mamba_state_scatter_with_mask`. For n candidates these read n states and write n states for each request and
layer, and keep n states of memory. Here verification reads the committed state once and writes no state: what it keeps
of a candidate is one corrected value vector, from which `promote_path` forms the one state that is wanted. SGLang's
ReplaySSM keeps the inputs of a linear draft to the same end; it replays token by token, and has no tree.
"""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.dispatch import backend_for
from sglang_hybrid_kernels.state_verify import naive
from sglang_hybrid_kernels.state_verify.check import Promotion, Tree, WindowPromotion


def state_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    parent: Tensor,
    *,
    scale: float = 1.0,
    check_slots: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out, values) of all candidates of one layer; each starts from its parent's state. The pool is only read.

    Candidate n with parent p, S_p the state after p (or the committed state):
        S = exp(g_n) S_p
        u_n = beta_n (v_n - S k_n), or v_n without beta
        S_n = S + u_n k_n^T
        out_n = scale S_n q_n

    q, k     [requests, nodes, key_heads, K], normalised if the model does so; Mamba2: C and B of each group.
    v        [requests, nodes, heads, V]; Mamba2: dt * x.
    g        [requests, nodes, heads] natural log decay of one step, not positive; Mamba2: dt * A.
    beta     [requests, nodes, heads], or None without the delta rule (Mamba2).
    pool     [slots, heads, V, K] fp32 or bf16. slots [requests] of the committed states; -1 starts from zero.
    parent   [requests, nodes] index of the parent, less than the node's own; -1 for children of the committed state; -2
             for a place without a node, whose inputs are not used and whose out and values are zero.

    out has the shape and dtype of v. values [requests, nodes, heads, V] float32 (float64 on float64) are the u_n, for
    `promote_path`. All nodes are solved for at once, as one chunk whose causal mask is the ancestor relation. Triton:
    up to 64 nodes, and it first copies what is strided but the pool. check_slots=False leaves out the checks that read
    index tensors, which on a GPU wait for the device. Raises ValueError for bad input.
    Source: EAGLE-2 and SpecInfer trees; Gated DeltaNet, chunked WY form, with the triangle replaced by a tree.
    """
    tree = Tree(q, k, v, g, beta, pool, slots, parent, scale)
    tree.check(check_slots)
    if backend_for(pool) == "triton":
        from sglang_hybrid_kernels.state_verify import triton

        return triton.state_verify(tree)
    return naive.state_verify(tree)


def promote_path(
    pool: Tensor,
    source: Tensor,
    destination: Tensor,
    k: Tensor,
    values: Tensor,
    g: Tensor,
    parent: Tensor,
    accepted: Tensor,
    *,
    check_slots: bool = True,
) -> None:
    """pool[:, destination[r]] = the state after candidate accepted[r], from the committed one in source[r]; all layers.

    pool           [layers, slots, heads, V, K].
    source         [requests] slots of the committed states; -1 for zero.
    destination    [requests] slots to write, often the same; -1 skips. No slot may be used by two requests.
    k, g, values   [layers, requests, nodes, ...]: what `state_verify` was given and returned, layer by layer.
    parent         [requests, nodes] as there. accepted [requests] the deepest accepted node; -1 for none (a copy).

    In one launch; the state is formed in fp32 and rounded once. Raises ValueError for bad input, before any write.
    """
    promotion = Promotion(pool, source, destination, k, values, g, parent, accepted)
    promotion.check(check_slots)
    if backend_for(pool) == "triton":
        from sglang_hybrid_kernels.state_verify import triton

        triton.promote_path(promotion)
    else:
        naive.promote_path(promotion)


def promote_window(
    pool: Tensor,
    source: Tensor,
    destination: Tensor,
    inputs: Tensor,
    parent: Tensor,
    accepted: Tensor,
    *,
    check_slots: bool = True,
) -> None:
    """pool[:, destination[r]] = the convolution window after candidate accepted[r]; the companion of `promote_path`.

    pool       [layers, slots, channels, width], the last inputs of the convolution, oldest first (width: kernel - 1).
    inputs     [layers, requests, nodes, channels] of the candidates, before the convolution, in the pool's dtype.
    source, destination, parent, accepted: as for `promote_path`; source -1 stands for a window of zeros.

    One launch, bit by bit. SGLang's `causal_conv1d_update` writes a window after each candidate instead, and
    `fused_conv_window_scatter_with_mask` promotes one. Raises ValueError for bad input, before any write.
    """
    promotion = WindowPromotion(pool, source, destination, inputs, parent, accepted)
    promotion.check(check_slots)
    if backend_for(pool) == "triton":
        from sglang_hybrid_kernels.state_verify import triton

        triton.promote_window(promotion)
    else:
        naive.promote_window(promotion)


__all__ = ["promote_path", "promote_window", "state_verify"]
