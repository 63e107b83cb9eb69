"""Where tokens are drawn, an answer has the distribution that it has without speculation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.engine.cpu.speculation import sampling
from tests.unit.engine_cpu.test_speculation import linked, path_to

TREES = {
    "chain": ([-1, 0, 1], [0, 1, 2]),
    "siblings": ([-1, 0, 0, 0], [0, 1, 2, 3]),
    "deep": ([-1, 0, 0, 1, 1, 2], [0, 1, 2, 0, 3, 1]),
    "root alone": ([-1], [0]),
}
VOCABULARY, DRAWS = 4, 4000


def walk(parents, tokens, probabilities, coins, finals, **thresholds):
    """Draw once for every row of `coins`; returns the accepted paths and the token behind each."""
    draws, nodes = coins.shape
    _, index, child, sibling = linked([parents] * draws)
    predicts = torch.full((draws * nodes,), -1, dtype=torch.int32)
    accepted, right = torch.full((draws, nodes), -1, dtype=torch.int32), torch.zeros(draws, dtype=torch.int32)
    sampling.tree_speculative_sampling_target_only(
        predicts, accepted, right, torch.tensor([tokens] * draws), index, child, sibling, coins, finals,
        probabilities.expand(draws, -1, -1), torch.zeros(0), **thresholds,
    )  # fmt: skip
    paths = [[at - draw * nodes for at in row if at >= 0] for draw, row in enumerate(accepted.tolist())]
    assert [len(path) - 1 for path in paths] == right.tolist()
    answers = []
    for draw, path in enumerate(paths):
        assert path == path_to(parents, path[-1])
        said = [int(predicts[draw * nodes + node]) for node in path]
        assert said[:-1] == [tokens[node] for node in path[1:]], "an accepted guess is what was said before it"
        answers.append(said)
    return paths, answers


@pytest.mark.parametrize("tree", TREES)
def test_tokens_have_the_models_distribution(tree):
    parents, tokens = TREES[tree]
    rng = torch.Generator().manual_seed(len(parents))
    probabilities = torch.rand(len(parents), VOCABULARY, generator=rng).softmax(-1)
    coins, finals = torch.rand(DRAWS, len(parents), generator=rng), torch.rand(DRAWS, generator=rng)
    paths, answers = walk(parents, tokens, probabilities, coins, finals)
    for node in range(len(parents)):
        here = [said[path.index(node)] for path, said in zip(paths, answers, strict=True) if node in path]
        if len(here) < 300:
            continue
        share = torch.bincount(torch.tensor(here), minlength=VOCABULARY) / len(here)
        wanted = probabilities[node]
        error = (wanted * (1 - wanted) / len(here)).sqrt()
        assert ((share - wanted).abs() < 4.5 * error).all(), (node, share, wanted)


def test_a_token_without_probability_is_never_said():
    parents, tokens = TREES["siblings"]
    probabilities = torch.tensor([[0.0, 0.0, 1.0, 0.0]] * 4)
    coins = torch.tensor([[0.0] * 4, [1 - 2**-24] * 4])
    paths, answers = walk(parents, tokens, probabilities, coins, torch.tensor([0.0, 1 - 2**-24]))
    assert paths == [[0, 2], [0, 2]]
    assert answers == [[2, 2], [2, 2]]


def test_a_threshold_below_one_takes_more_guesses():
    parents, tokens = TREES["chain"]
    probabilities = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 3)
    coins, finals = torch.full((1, 3), 0.9), torch.zeros(1)
    assert walk(parents, tokens, probabilities, coins, finals)[0] == [[0]]
    assert walk(parents, tokens, probabilities, coins, finals, threshold_single=0.25)[0] == [[0, 1, 2]]
    assert walk(parents, tokens, probabilities, coins, finals, threshold_acc=0.4)[0] == [[0, 1]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_greatest_few_are_kept(top_ks):
    probabilities = torch.rand(len(top_ks), 6, generator=torch.Generator().manual_seed(1)).softmax(-1)
    found = sampling.top_k_renorm_prob(probabilities, torch.tensor(top_ks))
    for row, (wanted, top_k) in enumerate(zip(probabilities, top_ks, strict=True)):
        kept = wanted.sort(descending=True).values[: min(top_k, 6)]
        torch.testing.assert_close(found[row].sort(descending=True).values[: len(kept)], kept / kept.sum())
        assert int((found[row] > 0).sum()) == min(top_k, 6)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4))
def test_the_fewest_that_reach_a_share_are_kept(top_ps):
    probabilities = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * len(top_ps))
    found = sampling.top_p_renorm_prob(probabilities, torch.tensor(top_ps))
    for row, top_p in zip(found, torch.tensor(top_ps).tolist(), strict=True):
        kept = 1 + sum(share < top_p - 1e-7 for share in (0.4, 0.7, 0.9))
        assert sorted(row.nonzero().flatten().tolist()) == sorted([1, 2, 3, 0][:kept])
        torch.testing.assert_close(row.sum(), torch.tensor(1.0))


def test_only_greedy_batches_take_the_greatest():
    rest = {"is_cpu": True, "is_hip": False, "is_xpu": False, "use_rejection_sampling": False}
    assert sampling.takes_greatest(is_all_greedy=True, **rest)
    assert not sampling.takes_greatest(is_all_greedy=False, **rest)
