"""A model whose state is the checksum of every token before it: an answer is right only if the state and the KV are.

It stands in for the layers of a real hybrid model. States, convolution windows and KV lie in SGLang's own pools and
are copied, tracked, cleared and freed by SGLang's code and ours; only the arithmetic is another: a state is the CRC-32
of the tokens so far, a convolution window holds the last tokens, KV holds each token. A pass that starts from a wrong
state, a stale slot or freed KV fails at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from sglang_hybrid.engine.cpu.speculation.trees import parents_of

FIRST, LETTERS = 33, 90
"""Greedy tokens are FIRST + checksum % LETTERS: printable, and one byte each."""


class WrongState(AssertionError):
    """A pass started from a state, window or KV that is not that of its prefix."""


def checksum(tokens: Any, before: int = 0) -> int:
    """CRC-32 of `tokens` [n] int, continued from the checksum of what comes before them."""
    return zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int32), before)


def next_token(state: int) -> int:
    """The greedy token behind a prefix whose checksum is `state`."""
    return FIRST + state % LETTERS


def answer(prompt: list[int], count: int, stops: Collection[int] = ()) -> list[int]:
    """The first `count` greedy tokens behind `prompt`, or those up to the first of `stops`."""
    state, tokens = checksum(prompt), list[int]()
    while len(tokens) < count and not (tokens and tokens[-1] in stops):
        tokens.append(next_token(state))
        state = checksum(tokens[-1:], state)
    return tokens


def digits(state: int) -> list[float]:
    """A state as numbers that are exact in any float type."""
    return [float(state >> shift & 255) for shift in (0, 8, 16, 24)]


def undigits(numbers: Any) -> int:
    """The state that was written as `numbers` [4]."""
    low, second, third, high = numbers.int().tolist()
    return low | second << 8 | third << 16 | high << 24


@dataclass
class Row:
    """One request of a prefill: where its tokens begin in the batch, the tokens, and the state before them."""

    begin: int
    tokens: np.ndarray
    before: int

    def state(self, offset: int) -> int:
        return checksum(self.tokens[:offset], self.before)

    def states(self) -> list[int]:
        """Behind every token."""
        return list(accumulate(self.tokens, lambda before, token: checksum([token], before), initial=self.before))[1:]


class FingerprintModel:
    """Takes the place of `model.forward` in a ModelRunner of SGLang."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._vocabulary = runner.model_config.vocab_size
        self._linear = runner.attn_backend.linear_attn_backend
        self._passes = 0

    def __call__(self, input_ids: Any, positions: Any, batch: Any, *_: Any, **__: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self._passes += 1
        self._rows = self._runner.req_to_token_pool
        held = self._rows.mamba_pool.mamba_cache
        self._states, self._windows = held.temporal[0], held.conv[0][0]
        if self._windows.shape[1] < self._windows.shape[2]:  # Kimi delta attention has the tokens first
            self._windows = self._windows.transpose(1, 2)
        kv = self._runner.token_to_kv_pool.full_kv_pool
        self._kv = (kv.k_buffer if hasattr(kv, "k_buffer") else kv.kv_buffer)[0]
        self._kv[batch.out_cache_loc, 0, 0] = input_ids.to(self._kv.dtype)
        slots = self._linear.forward_metadata.mamba_cache_indices.tolist()
        tokens = input_ids.numpy().astype(np.int32)
        self._hidden: list[int] = []
        run = self._extend
        if batch.forward_mode.is_target_verify():
            run = self._verify
        elif batch.forward_mode.is_decode():
            run = self._decode
        ends = run(batch, slots, tokens)
        logits = torch.zeros(len(ends), self._vocabulary)
        logits[range(len(ends)), [next_token(end) for end in ends]] = 1.0
        hidden = None
        if batch.capture_hidden_mode.need_capture():  # what a head reads: a state per token
            hidden = torch.zeros(len(self._hidden), self._runner.model_config.hidden_size)
            hidden[:, :4] = torch.tensor([digits(state) for state in self._hidden])
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)

    def _verify(self, batch: Any, slots: list[int], tokens: np.ndarray) -> list[int]:
        """Candidates leave states and windows of their own, each behind its parent; the pool stays as it is."""
        tree, held = batch.spec_info, self._rows.mamba_pool.mamba_cache
        nodes = tree.draft_token_num
        links = (tree.retrieve_next_token, tree.retrieve_next_sibling)
        parents = [list(range(-1, nodes - 1))] * len(slots)
        if tree.tree_topk != 1:  # n-grams are trees of any width
            parents = parents_of(*links).tolist()
        for row, (slot, prefix) in enumerate(zip(slots, batch.seq_lens.tolist(), strict=True)):
            if (self._passes + row) % 4 == 0:
                self._check(batch, row, slot, prefix)
            left = [self._read(slot)]
            windows = [self._windows[slot, 0].tolist()]
            for node in range(nodes):
                token = tokens[row * nodes + node : row * nodes + node + 1]
                parent = parents[row][node] + 1
                left.append(checksum(token, left[parent]))
                windows.append([*windows[parent][1:], float(token[0])])
                to = held.intermediate_ssm[0][row, node]
                to[(0,) * (to.dim() - 1)][:4] = torch.tensor(digits(left[-1]))
                held.intermediate_conv_window[0][0][row, node, 0] = torch.tensor(windows[-1])
            self._hidden += left[1:]
        return self._hidden

    def _decode(self, batch: Any, slots: list[int], tokens: np.ndarray) -> list[int]:
        lengths = batch.seq_lens.tolist()
        for row, slot in enumerate(slots):
            if (self._passes + row) % 8 == 0:
                self._check(batch, row, slot, lengths[row] - 1)
            self._write(slot, checksum(tokens[row : row + 1], self._read(slot)))
            self._windows[slot, 0] = torch.tensor([*self._windows[slot, 0].tolist()[1:], float(tokens[row])])
        if batch.mamba_track_mask is not None:
            for row, (tracks, to) in enumerate(
                zip(batch.mamba_track_mask.tolist(), batch.mamba_track_indices.tolist(), strict=True)
            ):
                if tracks:
                    self._write(to, self._read(slots[row]))
                    self._windows[to] = self._windows[slots[row]]
        return [self._read(slot) for slot in slots]

    def _extend(self, batch: Any, slots: list[int], tokens: np.ndarray) -> list[int]:
        lengths, at = list(batch.extend_seq_lens_cpu), 0
        rows: list[Row] = []
        for row, (slot, prefix) in enumerate(zip(slots, batch.extend_prefix_lens_cpu, strict=True)):
            self._check(batch, row, slot, prefix)
            rows.append(Row(at, tokens[at : at + lengths[row]], self._read(slot)))
            if batch.capture_hidden_mode.is_full():
                self._hidden += rows[-1].states()
            at += lengths[row]
        self._track_windows(batch, tokens)
        for slot, row in zip(slots, rows, strict=True):
            self._write(slot, row.state(row.tokens.size))
            window = [*self._windows[slot, 0].tolist(), *row.tokens.tolist()][-self._windows.shape[-1] :]
            self._windows[slot, 0] = torch.tensor(window, dtype=self._windows.dtype)
        self._track_states(rows)
        return [self._read(slot) for slot in slots]

    def _track_states(self, rows: list[Row]) -> None:
        """Copy the states that SGLang's metadata and ours want of this pass to the slots they name."""
        from sglang_hybrid.engine.cache.passes import forward
        from sglang_hybrid.engine.cache.passes.prefill_states import chunk_tokens

        metadata, chunk = self._linear.forward_metadata, chunk_tokens(self._linear)
        if type(self._linear).__name__ == "Mamba2AttnBackend":  # one grid of chunks over the whole batch
            for source, to in _pairs(metadata, "track_ssm_h_src", "track_ssm_h_dst"):
                row = next(row for row in rows if row.begin < source * chunk <= row.begin + row.tokens.size)
                self._write(to, row.state(source * chunk - row.begin))
            ends = _pairs(metadata, "track_ssm_seq_idx", "track_ssm_end_locs")
            again = _pairs(metadata, "track_ssm_seq_idx", "track_ssm_recompute_dst")
            for (row_at, end), (_, to) in zip(ends, again, strict=True):
                self._write(to, rows[row_at].state(end - rows[row_at].begin))
        else:  # every row has chunks of its own, one row after the other
            chunks = [(row, offset) for row in rows for offset in range(0, row.tokens.size, chunk)]
            if every := metadata.num_state_checkpoints and metadata.state_checkpoint_every_n_tokens:
                # FlashInfer: behind every so many tokens, and only if they were asked for.
                chunks = [(row, n * every) for row in rows for n in range(1, row.tokens.size // every + 1)]
                assert len(chunks) == metadata.num_state_checkpoints
                ends = list(accumulate((row.tokens.size // every for row in rows), initial=0))
                assert metadata.state_checkpoint_cu_starts.tolist() == ends
            for source, to in _pairs(metadata, "track_ssm_h_src", "track_ssm_h_dst"):
                row, offset = chunks[source]
                self._write(to, row.state(offset))
        for source, to in _pairs(metadata, "track_ssm_final_src", "track_ssm_final_dst"):
            self._write(to, self._read(source))
        if (beside := forward.beside()) is not None:
            for source, to in zip(beside.chunks.tolist(), beside.slots.tolist(), strict=True):
                row, offset = chunks[source]
                self._write(to, row.state(offset))
        inside = forward.inside_chunks()  # which our own kernel rolls forward
        if inside is not None:
            parts = (inside.sequences, inside.positions, inside.slots)
            for row_at, offset, to in zip(*(part.tolist() for part in parts), strict=True):
                self._write(to, rows[row_at].state(offset))

    def _track_windows(self, batch: Any, tokens: np.ndarray) -> None:
        metadata = self._linear.forward_metadata
        if metadata.has_mamba_track_mask:
            slots = metadata.conv_states_mask_indices.tolist()
            for slot, window in zip(slots, metadata.track_conv_indices.tolist(), strict=True):
                self._windows[slot, 0] = torch.tensor(tokens[window], dtype=self._windows.dtype)

    def _check(self, batch: Any, row: int, slot: int, prefix: int) -> None:
        """The state in `slot` and the KV of the row's first `prefix` tokens are those of one and the same prefix."""
        locations = self._rows.req_to_token[batch.req_pool_indices[row], :prefix].long()
        held = self._kv[locations, 0, 0].numpy().astype(np.int32)
        if checksum(held) != self._read(slot):
            raise WrongState(f"row {row}: the state in slot {slot} is not that of the {prefix} tokens before the pass")
        window = self._windows[slot, 0].numpy().astype(np.int32)
        if prefix >= window.size and not np.array_equal(held[-window.size :], window):
            raise WrongState(f"row {row}: the window in slot {slot} is not that of the {prefix} tokens before the pass")

    def _read(self, slot: int) -> int:
        return undigits(self._states[slot].reshape(-1)[:4])

    def _write(self, slot: int, state: int) -> None:
        self._states[(slot, *(0,) * (self._states.dim() - 2))][:4] = torch.tensor(digits(state))


def _pairs(metadata: Any, first: str, second: str) -> list[tuple[int, int]]:
    firsts, seconds = getattr(metadata, first, None), getattr(metadata, second, None)
    return [] if firsts is None or seconds is None else list(zip(firsts.tolist(), seconds.tolist(), strict=True))
