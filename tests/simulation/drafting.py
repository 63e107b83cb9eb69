"""What drafts beside `fingerprint`: a head or a model whose guesses are right only if its own KV is.

SGLang feeds both with token i + 1 at position i, a head with the target's state behind token i as well. Their KV of a
position keeps the token and that state. A guess is the target's own next token but for one in four, so that runs of all
lengths occur.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tests.simulation.fingerprint import FIRST, LETTERS, checksum, digits, next_token, undigits


class WrongDraft(AssertionError):
    """A pass of what drafts started from KV or states that are not those of its prefix."""


class FingerprintDraft:
    """Takes the place of `model.forward` in the ModelRunner of what drafts. `reads` says whether it is a head."""

    def __init__(self, runner: Any, target: Any, reads: bool) -> None:
        self._runner, self._target, self._reads = runner, target, reads
        self._vocabulary = runner.model_config.vocab_size
        self._width = runner.model_config.hidden_size
        self._passes = 0
        self.stale = self.checked = 0
        """Positions whose KV was computed in front of another token: where prompts part, as keys are tokens."""

    def __call__(self, input_ids: Any, positions: Any, batch: Any, *_: Any, **__: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self._passes += 1
        self._kv = _keys(self._runner.token_to_kv_pool)
        self._known = _keys(self._target.token_to_kv_pool)
        self._table = self._target.req_to_token_pool.req_to_token
        tokens = input_ids.numpy().astype(np.int32)
        fed = [undigits(each) for each in batch.spec_info.hidden_states[:, :4]] if self._reads else None
        run = self._steps if batch.forward_mode.is_decode() else self._extend
        self._kv[batch.out_cache_loc, 0, 0] = input_ids.to(self._kv.dtype)
        before, wanted = run(batch, tokens, fed)
        self._kv[batch.out_cache_loc, 0, 1:5] = torch.tensor([digits(state) for state in before]).to(self._kv.dtype)
        left = [checksum(tokens[row : row + 1], before[row]) for row in wanted]
        logits = torch.zeros(len(left), self._vocabulary)
        for row, state in enumerate(left):
            right = next_token(state)
            others = [FIRST + (right - FIRST + step) % LETTERS for step in (1, 2)]
            first, *rest = [right, *others] if state >> 3 & 3 else [others[0], right, others[1]]
            logits[row, [first, *rest]] = torch.tensor([9.0, 8.0, 7.0])
        hidden = torch.zeros(len(left), self._width)
        hidden[:, :4] = torch.tensor([digits(state) for state in left])
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden if self._reads else None)

    def _extend(self, batch: Any, tokens: np.ndarray, fed: list[int] | None) -> tuple[list[int], list[int]]:
        """The target's state in front of each token, and the rows whose guesses are wanted."""
        drafted, lengths = batch.forward_mode.is_draft_extend_v2(), list(batch.extend_seq_lens_cpu)
        accepted = batch.spec_info.num_accept_tokens.tolist() if drafted else lengths
        before: list[int] = []
        ends: list[int] = []
        for row, (length, prefix, good) in enumerate(zip(lengths, batch.extend_prefix_lens_cpu, accepted, strict=True)):
            places = self._table[batch.req_pool_indices[row], : prefix + good].long()
            known = self._known[places, 0, 0].numpy().astype(np.int32)
            if not drafted or (self._passes + row) % 16 == 0:
                self._check(row, known, places[:prefix], drafted)
            states = _states(known[prefix:], checksum(known[:prefix]))
            if fed is not None and states != fed[len(before) : len(before) + good]:
                raise WrongDraft(f"row {row}: fed with states that are not those behind {prefix} tokens")
            before += states + [0] * (length - good)
            ends.append(len(before) - 1)
        return before, list(range(len(before))) if drafted else ends

    def _check(self, row: int, known: np.ndarray, places: Any, drafted: bool) -> None:
        held = self._kv[places, 0, :5].float()
        wanted = torch.tensor([digits(state) for state in _states(known[: len(places)], 0)]).view(-1, 4)
        wrong = (held[:, 1:] != wanted).any(-1).nonzero().flatten().tolist()
        if wrong:
            raise WrongDraft(
                f"row {row}: the KV of what drafts is that of other tokens at {wrong[:5]}, {len(wrong)} of "
                f"{len(places)} in front of the pass, verified {drafted}"
            )
        following = torch.from_numpy(known[1 : len(places) + 1].astype(np.float32))
        other = (held[: len(following), 0] != following).nonzero().flatten().tolist()
        self.checked += 1
        self.stale += len(other)

    def _steps(self, batch: Any, tokens: np.ndarray, fed: list[int] | None) -> tuple[list[int], list[int]]:
        """As `_extend`, for a step of the draft of a few branches."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if fed is not None:
            return fed, list(range(len(fed)))
        backend, before = get_attn_backend(), []
        branches = len(backend.lens) // len(batch.req_pool_indices)
        for row, length in enumerate(backend.lens.tolist()):
            places = backend.table[row, : length - 1].long()
            begin = self._known[self._table[batch.req_pool_indices[row // branches], :1].long(), 0, 0]
            before.append(checksum(torch.cat([begin, self._kv[places, 0, 0]]).numpy().astype(np.int32)))
        return before, list(range(len(before)))


def foresee(worker: Any, runner: Any) -> None:
    """Let n-grams be right for up to five tokens, and branch: what a fingerprint says is in no corpus."""
    original = worker._prepare_draft_tokens

    def prepare(batch: Any) -> tuple[np.ndarray, np.ndarray]:
        drafts, mask = (given.copy() for given in original(batch))
        nodes, rows = worker.draft_token_num, runner.req_to_token_pool
        states = rows.mamba_pool.mamba_cache.temporal[0]
        for row, slot in enumerate(rows.get_mamba_indices(batch.req_pool_indices).tolist()):
            tree, seen = drafts[row * nodes : (row + 1) * nodes], np.eye(nodes, dtype=mask.dtype)
            state = checksum(tree[:1], undigits(states[slot].reshape(-1)[:4]))
            right = state >> 3 & 7
            for node in range(1, nodes):
                parent = node - 1 if node <= right else (node - 1) // 2
                tree[node] = next_token(state) if node <= right else FIRST + (state + node) % LETTERS
                state = checksum(tree[node : node + 1], state) if node < right else state + 1
                seen[node] |= seen[parent]
            mask[row * nodes**2 : (row + 1) * nodes**2] = seen.ravel()
        return drafts, mask

    worker._prepare_draft_tokens = prepare


def _states(tokens: np.ndarray, before: int) -> list[int]:
    """Behind each of `tokens`."""
    return list(accumulate(tokens, lambda state, token: checksum([token], state), initial=before))[1:]


def _keys(pool: Any) -> Any:
    return getattr(pool, "full_kv_pool", pool).k_buffer[0]
