"""Trees of candidates: parents, links and masks, and the path that a model agrees with.

SGLang links a tree by the first child of each node and the next sibling of each node, both [requests, nodes] with -1
for none. Children stand behind their parents, siblings in ascending order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_QLEN_ONLY = 1
"""SGLang's TreeMaskMode of a CPU: [nodes, nodes] per request, nothing about the prefix."""


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees that are given by their ancestors: tree_mask [requests, nodes, nodes], flat."""
    nodes = draft_token_num
    ancestors = tree_mask.view(batch_size, nodes, nodes).bool().tril(-1)
    positions.view(batch_size, nodes).copy_(ancestors.sum(-1) + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(batch_size * nodes).view(batch_size, nodes))
    parents = torch.where(ancestors.any(-1), (ancestors * torch.arange(nodes)).amax(-1), -1)
    _link(parents.tolist(), retrieve_next_token, retrieve_next_sibling)


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = _QLEN_ONLY,
) -> None:
    """Trees of a draft model's best guesses: links, positions and masks of ancestors.

    Guess i of `selected_index` [requests, nodes - 1] is one of the topk children of block i // topk. Block 0 hangs on
    node 0, block b on the guess parent_list[b].
    """
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(f"on a CPU masks are those of the candidates alone: tree_mask_mode={tree_mask_mode}")
    nodes, requests = draft_token_num, verified_seq_len.numel()
    blocks = parent_list.view(requests, -1).tolist() if parent_list.numel() else [[] for _ in range(requests)]
    parents, mask = [], torch.zeros(requests, nodes, nodes, dtype=torch.bool)
    for request, (known, chosen) in enumerate(zip(blocks, selected_index.tolist(), strict=True)):
        tree = [-1]
        for guess in chosen[: nodes - 1]:
            block = guess // topk
            tree.append(0 if block == 0 else chosen.index(known[block]) + 1)
        for node, parent in enumerate(tree):
            if parent >= 0:
                mask[request, node] = mask[request, parent]
            mask[request, node, node] = True
        parents.append(tree)
    tree_mask[: mask.numel()] = mask.flatten()
    positions.view(requests, nodes).copy_(mask.sum(-1) - 1 + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    _link(parents, retrieve_next_token, retrieve_next_sibling)


def parents_of(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Parents [requests, nodes] of linked trees, -1 for nodes without one."""
    trees = []
    for child, sibling in zip(next_token.tolist(), next_sibling.tolist(), strict=True):
        parent = [-1] * len(child)
        for node in range(len(child)):  # a node's own parent is known when its turn comes
            if child[node] >= 0:
                parent[child[node]] = node
            if sibling[node] >= 0:
                parent[sibling[node]] = parent[node]
        trees.append(parent)
    return torch.tensor(trees)


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from node 0 to the child that is the model's own next token, as long as there is one.

    candidates, target_predict: [requests, nodes] tokens, what a node is and what the model says behind it. Writes the
    accepted nodes to accept_index [requests, depth], the tokens behind them to predicts [requests * nodes], and how
    many guesses were right to accept_token_num [requests].
    """
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    for row, (tokens, index, child, sibling, following) in enumerate(zip(*(t.tolist() for t in tables), strict=True)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            guess = child[path[-1]]
            while guess != -1 and tokens[guess] != following[path[-1]]:
                guess = sibling[guess]
            if guess == -1:
                break
            path.append(guess)
        predicts[[index[node] for node in path]] = torch.tensor(
            [following[node] for node in path], dtype=predicts.dtype
        )
        accept(row, [index[node] for node in path], accept_index, accept_token_num)


def accept(row: int, path: list[int], accept_index: Tensor, accept_token_num: Tensor) -> None:
    """Write the accepted nodes of request `row`, node 0 among them, and how many of them were guesses."""
    accept_index[row, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
    accept_token_num[row] = len(path) - 1


def _link(parents: list[list[int]], next_token: Tensor, next_sibling: Tensor) -> None:
    """Write first children and next siblings of trees that are given by their parents."""
    children, siblings = [], []
    for tree in parents:
        child, sibling = [-1] * len(tree), [-1] * len(tree)
        for node in range(len(tree) - 1, 0, -1):
            parent = tree[node]
            if parent >= 0:
                sibling[node], child[parent] = child[parent], node
        children.append(child)
        siblings.append(sibling)
    next_token.copy_(torch.tensor(children).view_as(next_token))
    next_sibling.copy_(torch.tensor(siblings).view_as(next_sibling))
