"""Our trees beside SGLang's Triton kernels, under Triton's interpreter: a process of its own, `test_trees.py` runs it.

Prints how many random cases were compared; ends on the first that differs.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from sglang_hybrid.engine import cpu
from sglang_hybrid.engine.cpu.speculation import trees


def kernels() -> Any:
    """The module with the launchers of SGLang's tree kernels, which 0.5.22 moved."""
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.speculative import eagle_utils

    return spec_tree if hasattr(spec_tree, "verify_tree_greedy_triton") else eagle_utils


def drafted(rng: torch.Generator, requests: int, topk: int, steps: int, nodes: int) -> tuple[torch.Tensor, ...]:
    """Blocks' parents and the best guesses of a draft model, as SGLang's worker collects them from random scores."""
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    scores, hidden, collected = None, torch.zeros(requests, 4), []
    best, tokens = torch.rand(requests, topk, generator=rng), torch.randint(0, 9, (requests, topk), generator=rng)
    for step in range(steps):
        _, hidden, scores, found = select_top_k_tokens(step, best, tokens, hidden, scores, topk)
        collected.append(found)
        best = torch.rand(requests * topk, topk, generator=rng)
        tokens = torch.randint(0, 9, (requests * topk, topk), generator=rng)
    parents, chosen, guesses = organize_draft_results(*map(list, zip(*collected, strict=True)), nodes)
    return parents, chosen, guesses


def empty_links(requests: int, nodes: int) -> list[torch.Tensor]:
    return [torch.full((requests, nodes), -1) for _ in range(3)]


def check_draft(case: int) -> None:
    random.seed(case)
    rng = torch.Generator().manual_seed(case)
    requests, topk, steps = random.randint(1, 3), random.randint(1, 4), random.randint(1, 4)
    nodes = 1 + random.randint(1, topk + (steps - 1) * topk * topk) if topk > 1 else steps + 1
    parents, chosen, guesses = drafted(rng, requests, topk, steps, nodes)
    lengths = torch.randint(1, 50, (requests,), generator=rng)
    results = []
    for build in (kernels().sgl_build_tree_kernel_triton, trees.build_tree_kernel_efficient):
        links = empty_links(requests, nodes)
        mask = torch.ones(requests * nodes * nodes, dtype=torch.bool)
        positions = torch.zeros(requests * nodes, dtype=torch.int64)
        build(parents, chosen, lengths, mask, positions, *links, topk, steps, nodes, kernels().TreeMaskMode(1))
        results.append((mask, positions, *links))
    compare(f"draft {case}: topk {topk}, {steps} steps, {nodes} nodes", *results)
    _, _, *links = results[0]
    check_walk(rng, links, torch.cat([torch.zeros(requests, 1, dtype=torch.int64), guesses], 1))
    check_masks(results[0][0], lengths, requests, nodes)


def check_walk(rng: torch.Generator, links: list[torch.Tensor], tokens: torch.Tensor) -> None:
    requests, nodes = tokens.shape
    said = torch.randint(0, 3, (requests, nodes), generator=rng)  # few tokens: paths of some length
    tokens = tokens % 3
    depth, results = nodes, []
    for walk in (kernels().verify_tree_greedy_triton, trees.verify_tree_greedy):
        predicts = torch.zeros(requests * nodes, dtype=torch.int32)
        accepted = torch.full((requests, depth), -1, dtype=torch.int32)
        right = torch.zeros(requests, dtype=torch.int32)
        walk(predicts, accepted, right, tokens, *links, said)
        results.append((predicts, accepted, right))
    compare("walk", *results)


def check_masks(mask: torch.Tensor, lengths: torch.Tensor, requests: int, nodes: int) -> None:
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_triton

    results = []
    for rebuild in (reconstruct_indices_from_tree_mask_triton, trees.reconstruct_indices_from_tree_mask):
        links = empty_links(requests, nodes)
        positions = torch.zeros(requests * nodes, dtype=torch.int64)
        rebuild(mask, lengths, positions, *links, requests, nodes)
        results.append((positions, *links))
    compare("masks", *results)


def compare(what: str, theirs: tuple[torch.Tensor, ...], ours: tuple[torch.Tensor, ...]) -> None:
    for number, (wanted, found) in enumerate(zip(theirs, ours, strict=True)):
        if not torch.equal(wanted, found):
            raise AssertionError(f"{what}, result {number}: {wanted.tolist()} wanted, {found.tolist()} found")


def main(cases: int = 60) -> None:
    assert cpu.install()
    for case in range(cases):
        check_draft(case)
    sys.stdout.write(f"{cases}\n")


if __name__ == "__main__":
    main()
