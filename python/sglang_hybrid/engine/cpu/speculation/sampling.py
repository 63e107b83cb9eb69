"""Verification where tokens are drawn: an answer has the distribution that it has without speculation.

With an empty `sgl_kernel` SGLang would take the greatest logit on a CPU, whatever temperature a request asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.engine.cpu.speculation.trees import accept


def takes_greatest(*, is_all_greedy: bool, **_: Any) -> bool:
    """Whether a batch is verified by greatest logits: stands for SGLang's answer, which is always yes on a CPU."""
    return is_all_greedy


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk each tree from node 0: a child is taken with the probability that the model gives its token.

    target_probs: [requests, nodes, vocabulary]; uniform_samples [requests, nodes] and ..._for_final_sampling
    [requests] in [0, 1). Where no child is taken the token behind the path is drawn from what is left of the
    distribution. Thresholds below 1 take more than that, as SGLang's flags say. Writes what
    `trees.verify_tree_greedy` writes; the probabilities of the draft are not asked for.
    """
    depth = accept_index.shape[1]
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples)
    for row, (tokens, index, child, sibling, coins) in enumerate(zip(*(t.tolist() for t in tables), strict=True)):
        node, accepted, refused = 0, [index[0]], []
        while len(accepted) < depth:
            guess, sum_probability, refused = child[node], 0.0, []
            while guess != -1:
                probability = float(target_probs[row, node, tokens[guess]])
                sum_probability += probability
                if coins[node] < sum_probability / threshold_acc or probability >= threshold_single:
                    break
                refused.append(tokens[guess])
                guess = sibling[guess]
            if guess == -1:
                break
            predicts[index[node]] = tokens[guess]
            node, refused = guess, []
            accepted.append(index[node])
        left = target_probs[row, node].clone()
        left[refused] = 0.0
        predicts[index[node]] = _drawn(left, float(uniform_samples_for_final_sampling[row]), target_probs[row, node])
        accept(row, accepted, accept_index, accept_token_num)


def _drawn(weights: Tensor, coin: float, otherwise: Tensor) -> int:
    """The index of `weights` [vocabulary] that `coin` in [0, 1) falls on; of `otherwise` where nothing has a weight."""
    total = weights.sum()
    if not total > 0:  # rounding refused the last token that had one
        weights, total = otherwise, otherwise.sum()
    bound = torch.searchsorted(weights.cumsum(0), coin * total, right=True)
    return int(min(int(bound), int(weights.nonzero()[-1])))


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """probs [rows, vocabulary] without all but the top_ks [rows] greatest of each row, summing to 1 again."""
    ranks = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1, stable=True)
    kept = probs.masked_fill(ranks >= top_ks[:, None], 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """probs [rows, vocabulary]: of each row the fewest that together have top_ps [rows], summing to 1 again."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_ps[:, None], 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)
