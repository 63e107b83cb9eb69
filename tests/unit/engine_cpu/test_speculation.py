"""Verification of speculative decoding on a CPU: every candidate is what decoding its path alone would give."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.engine.cpu import attention, causal_conv, gdn, mamba2
from sglang_hybrid.engine.cpu.speculation import candidates, kv_slots, trees

HK, HV, K, V = 1, 2, 8, 6
H, G, P, N = 4, 2, 3, 5
CHANNELS, WIDTH = 5, 4
POOL = 6


@st.composite
def forests(draw):
    """One to three trees of one size, as parents; children stand behind their parents."""
    nodes = draw(st.integers(1, 8))
    tree = st.tuples(st.just(-1), *(st.integers(0, node - 1) for node in range(1, nodes)))
    return [list(parents) for parents in draw(st.lists(tree, min_size=1, max_size=3))]


def path_to(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def mask_of(parents):
    """[nodes, nodes]: which nodes each node descends from, itself included."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, path_to(parents, node)] = True
    return mask


def linked(forest):
    """Positions, indices, first children and next siblings of trees, as SGLang has them."""
    requests, nodes = len(forest), len(forest[0])
    links = [torch.empty(requests, nodes, dtype=torch.int64) for _ in range(3)]
    positions = torch.empty(requests * nodes, dtype=torch.int64)
    mask = torch.stack([mask_of(parents) for parents in forest]).flatten()
    trees.reconstruct_indices_from_tree_mask(mask, torch.full((requests,), 10), positions, *links, requests, nodes)
    return positions, *links


def slots_of(forest):
    """A slot of a pool for each request, none the first, not in order."""
    return torch.tensor([POOL - 1 - request for request in range(len(forest))])


@given(forest=forests())
def test_a_tree_has_the_same_parents_after_masks_and_links(forest):
    positions, _, child, sibling = linked(forest)
    assert trees.parents_of(child, sibling).tolist() == forest
    assert positions.tolist() == [9 + len(path_to(tree, node)) for tree in forest for node in range(len(tree))]


@given(forest=forests(), pool_type=st.sampled_from([torch.float32, torch.bfloat16]), chain=st.booleans())
def test_gated_delta_rule(forest, pool_type, chain):
    rng = torch.Generator().manual_seed(1)
    if chain:
        forest = [list(range(-1, len(forest[0]) - 1)) for _ in forest]
    requests, nodes = len(forest), len(forest[0])
    rows, slots = requests * nodes, slots_of(forest)
    pool = torch.randn(POOL, HV, V, K, generator=rng).to(pool_type)
    A_log, dt_bias = torch.randn(HV, generator=rng), torch.randn(HV, generator=rng)
    q, k = (torch.randn(1, rows, HK, K, generator=rng) for _ in range(2))
    v = torch.randn(1, rows, HV, V, generator=rng)
    a, b = (torch.randn(rows, HV, generator=rng) for _ in range(2))
    before, buffer = pool.clone(), torch.full((requests + 1, nodes, HV, V, K), 7.0, dtype=pool_type)
    out = gdn.recurrent_gated_delta_rule(
        A_log, dt_bias, q, k, v, a, b, pool, slots, disable_state_update=True, intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.arange(requests + 1), cache_steps=nodes,
        retrieve_parent_token=None if chain else torch.tensor(forest),
    )  # fmt: skip
    assert torch.equal(pool, before), "the committed states stay as they are"
    assert (buffer[requests] == 7).all(), "rows of other requests stay as they are"
    for request, parents in enumerate(forest):
        for node in range(nodes):
            state = before[slots[request] : slots[request] + 1].clone()
            for each in path_to(parents, node):
                one = slice(request * nodes + each, request * nodes + each + 1)
                decoded = gdn.recurrent_gated_delta_rule(
                    A_log, dt_bias, q[:, one], k[:, one], v[:, one], a[one], b[one], state, torch.tensor([0])
                )
            tight = {"atol": 1e-6, "rtol": 1e-5} if pool_type == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
            torch.testing.assert_close(buffer[request, node], state[0], **tight)
            torch.testing.assert_close(out[0, request * nodes + node], decoded[0, 0], **tight)


@given(forest=forests(), chain=st.booleans())
def test_mamba2(forest, chain):
    rng = torch.Generator().manual_seed(2)
    if chain:
        forest = [list(range(-1, len(forest[0]) - 1)) for _ in forest]
    requests, nodes = len(forest), len(forest[0])
    slots, pool = slots_of(forest), torch.randn(POOL, H, P, N, generator=rng)
    x = torch.randn(requests, nodes, H, P, generator=rng)
    dt = torch.randn(requests, nodes, H, generator=rng)[..., None].expand(-1, -1, -1, P)
    A = -torch.rand(H, generator=rng)[:, None, None].expand(-1, P, N)
    B, C = (torch.randn(requests, nodes, G, N, generator=rng) for _ in range(2))
    D, dt_bias = (torch.randn(H, generator=rng)[:, None].expand(-1, P) for _ in range(2))
    before, buffer = pool.clone(), torch.full((requests + 1, nodes, H, P, N), 7.0)
    out = torch.empty_like(x)
    mamba2.selective_state_update(
        pool, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots, out=out,
        disable_state_update=True, intermediate_states_buffer=buffer, cache_steps=nodes,
        retrieve_parent_token=None if chain else torch.tensor(forest),
        intermediate_state_indices=torch.arange(requests),
    )  # fmt: skip
    assert torch.equal(pool, before)
    for request, parents in enumerate(forest):
        for node in range(nodes):
            state, y = before[slots[request]][None].clone(), torch.empty(1, H, P)
            for each in path_to(parents, node):
                now = (request, slice(each, each + 1))
                mamba2.selective_state_update(
                    state, x[now], dt[now], A, B[now], C[now], D, dt_bias=dt_bias, dt_softplus=True,
                    state_batch_indices=torch.tensor([0]), out=y,
                )  # fmt: skip
            torch.testing.assert_close(buffer[request, node], state[0])
            torch.testing.assert_close(out[request, node], y[0])


@given(forest=forests(), chain=st.booleans(), bias=st.booleans())
def test_convolution(forest, chain, bias):
    rng = torch.Generator().manual_seed(3)
    if chain:
        forest = [list(range(-1, len(forest[0]) - 1)) for _ in forest]
    requests, nodes = len(forest), len(forest[0])
    slots, pool = slots_of(forest), torch.randn(POOL, CHANNELS, WIDTH - 1, generator=rng)
    x = torch.randn(requests, nodes, CHANNELS, generator=rng).mT
    weight = torch.randn(CHANNELS, WIDTH, generator=rng)
    shift = torch.randn(CHANNELS, generator=rng) if bias else None
    before, buffer = pool.clone(), torch.full((requests + 1, nodes, CHANNELS, WIDTH - 1), 7.0)
    parents_out = torch.full((requests, nodes), -9)
    _, _, child, sibling = linked(forest)
    links = {} if chain else {"retrieve_next_token": child, "retrieve_next_sibling": sibling}
    out = causal_conv.causal_conv1d_update(
        x, pool, weight, shift, "silu", conv_state_indices=slots, intermediate_conv_window=buffer,
        intermediate_state_indices=torch.arange(requests), **links,
        retrieve_parent_token=None if chain else parents_out,
    )  # fmt: skip
    assert torch.equal(pool, before)
    assert chain or parents_out.tolist() == forest, "the recurrence reads the parents from here"
    out.transpose(1, 2).view(requests * nodes, -1)  # what SGLang does next: no copy
    for request, parents in enumerate(forest):
        for node in range(nodes):
            window = before[slots[request]][None].clone()
            for each in path_to(parents, node):
                y = causal_conv.causal_conv1d_update(
                    x[request : request + 1, :, each], window, weight, shift, "silu",
                    conv_state_indices=torch.tensor([0]),
                )  # fmt: skip
            torch.testing.assert_close(buffer[request, node], window[0])
            torch.testing.assert_close(out[request, :, node], y[0])


@pytest.mark.parametrize("windows", [1, 2])
def test_what_is_accepted_is_committed_and_a_checkpoint_is_kept(windows):
    layers, requests, nodes = 2, 3, 4
    temporal = torch.zeros(layers, POOL, 3)
    left = torch.arange(layers * requests * nodes * 3.0).view(layers, requests, nodes, 3)
    conv = [torch.zeros(layers, POOL, 2) for _ in range(windows)]
    left_windows = [100 + torch.rand(layers, requests, nodes, 2) for _ in range(windows)]
    caches = SimpleNamespace(temporal=temporal, intermediate_ssm=left, conv=conv, intermediate_conv_window=left_windows)
    slots, steps = torch.tensor([4, 2, -1]), torch.tensor([3, 0, 1])
    track_slots, track_steps = torch.tensor([5, 1, 3]), torch.tensor([1, -1, 2])
    candidates.commit(caches, slots, steps, track_slots, track_steps)
    for pool, source in ((temporal, left), *zip(conv, left_windows, strict=True)):
        wanted = torch.zeros_like(pool)
        for slot, request, node in ((4, 0, 3), (2, 1, 0), (5, 0, 1), (3, 2, 2)):
            wanted[:, slot] = source[:, request, node]
        assert torch.equal(pool, wanted)
    candidates.commit(caches, torch.tensor([0]), torch.tensor([2]), None, None)
    assert torch.equal(temporal[:, 0], left[:, 0, 2])
    candidates.commit(caches, torch.tensor([0, 1]), torch.tensor([2, 1]), None, None, torch.tensor([2, -1]))
    assert torch.equal(temporal[:, 0], left[:, 2, 2]), "SGLang says in which row a request's candidates are"


@given(forest=forests(), grouped=st.booleans(), chain=st.booleans())
def test_a_candidate_sees_the_prefix_and_its_ancestors(forest, grouped, chain):
    rng = torch.Generator().manual_seed(4)
    if chain:
        forest = [list(range(-1, len(forest[0]) - 1)) for _ in forest]
    requests, nodes = len(forest), len(forest[0])
    heads, size = 4, 8
    kv_heads = 2 if grouped else heads
    lens = torch.tensor([3, 0, 5][:requests])
    table = torch.randperm(requests * 20, generator=rng).view(requests, 20)
    keys, values = (torch.randn(requests * 20, kv_heads, size, generator=rng) for _ in range(2))
    query = torch.randn(requests * nodes, heads, size, generator=rng)
    masks = torch.stack([mask_of(parents) for parents in forest])
    tree = SimpleNamespace(draft_token_num=nodes, tree_topk=1 if chain else -1, custom_mask=masks.flatten())
    output = torch.empty_like(query)
    attention.extend(
        None, SimpleNamespace(candidates=tree), query, output, keys, values, table, torch.arange(requests), lens, None,
        None, scaling=0.3, enable_gqa=grouped, causal=True,
    )  # fmt: skip
    for request, parents in enumerate(forest):
        for node in range(nodes):
            columns = [*range(lens[request]), *(int(lens[request]) + each for each in path_to(parents, node))]
            k, v = (cache[table[request, columns]].repeat_interleave(heads // kv_heads, 1) for cache in (keys, values))
            row = query[request * nodes + node]
            weights = (torch.einsum("hd,shd->hs", row, k) * 0.3).softmax(-1)
            torch.testing.assert_close(output[request * nodes + node], torch.einsum("hs,shd->hd", weights, v))


def test_kv_slots():
    table = torch.arange(40).view(4, 10)
    out = torch.empty(5, dtype=torch.int64)
    kv_slots.assign_extend_cache_locs(torch.tensor([2, 0]), table, torch.tensor([1, 4]), torch.tensor([4, 6]), out, 10)
    assert out.tolist() == [21, 22, 23, 4, 5]
    out = torch.empty(8, dtype=torch.int64)
    kv_slots.assign_draft_cache_locs_contiguous(torch.tensor([3, 1]), table, torch.tensor([2, 5]), out, 10, 2, 2)
    assert out.tolist() == [32, 33, 34, 35, 15, 16, 17, 18]
    accepted, packed = torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.zeros(6, dtype=torch.int64)
    kv_slots.fill_accept_out_cache_loc(accepted, torch.tensor([50, 51, 52, 53, 54, 55]), packed)
    assert packed.tolist() == [50, 52, 53, 0, 0, 0]
    bonus = torch.empty(2, dtype=torch.int32)
    kv_slots.fill_bonus_tokens(torch.tensor([7, 8, 9, 1, 2, 3]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [8, 1]


@given(moves=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8, unique_by=lambda move: move[0]))
def test_rows_of_kv_move_all_at_once(moves):
    buffers = [torch.rand(10, 3), torch.rand(10, 2).bfloat16()]
    wanted = [buffer.clone() for buffer in buffers]
    target, source = (torch.tensor([move[end] for move in moves], dtype=torch.int64) for end in (0, 1))
    for buffer in wanted:
        buffer[target] = buffer[source].clone()
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    row_bytes = torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in buffers])
    kv_slots.copy_all_layer_kv_cache(addresses, row_bytes, target, source)
    assert all(torch.equal(buffer, other) for buffer, other in zip(buffers, wanted, strict=True))


def test_sglangs_kernels_verify_on_states_that_lie_apart(interpreted):
    """As states of elastic memory do: Triton's verification, windows and commit, for chains and trees."""
    assert set(interpreted("tests.unit.engine_cpu.strides_oracle").split()) == {"0.0"}
