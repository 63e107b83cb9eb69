"""Keeps states from being filed under a length that is not theirs.

A verification accepts a run of tokens. The device commits all of it: the live state moves to its end, and where the run
crosses a line of the grid the state there goes to one of the request's tracked slots. The scheduler learns of the run
later and may keep less of it: a grammar that ends cuts the run, and only in a request's last step. A stop cuts nothing
(the tail stays in `output_ids` and in the KV), and `--strip-thinking-cache` cuts the whole answer from the key.

A state cannot be made shorter. Where it is longer than what the scheduler calls it, it is not filed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_hybrid.engine.cache import hooks
from sglang_hybrid.engine.cache.requests import answered, tracked
from sglang_hybrid.engine.compat import state_of


def kept(result: Any, i: int) -> int | None:
    """Tokens that its grammar left of the run of request `i`; None without a grammar."""
    retained = result.grammar_retained_tokens
    return None if retained is None or retained[i] is None else len(retained[i])


def boundary(
    original: Any, processor: Any, req: Any, batch: Any, result: Any, i: int, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `_mamba_check_track_boundary`: look for a line in what the grammar left of the run, as 0.5.23 does.

    The length before the run is computed backwards from the length after it. Older versions subtract the whole run from
    the length after the cut one, and note lines that were crossed a step before, or never.
    """
    left = kept(result, i)
    if batch.spec_algorithm.is_none() or left is None:
        return original(processor, req, batch, result, i, *args, **kwargs)
    tracked_tokens = max(left - (_undrafted(result) - 1), 0)
    return original(processor, req, batch, _run(i, tracked_tokens - 1), i, *args, **kwargs)


def settle(_: Any, processor: Any, req: Any, batch: Any, result: Any, i: int, *args: Any, **kwargs: Any) -> None:
    """AFTER `_mamba_prefix_cache_update`, before an ended request is filed: forget what a cut run's tail overwrote.

    Without the overlap schedule there is one tracked slot, and with extra_buffer_lazy there may be: a line crossed in
    the tail takes the place of the state that the request still names by an older line. With two slots the tail goes to
    the other one.
    """
    left = None if batch.spec_algorithm.is_none() or not req.finished() else kept(result, i)
    if left is None:
        return
    correct = result.num_correct_drafts_per_req_cpu[i]
    dropped = correct + _undrafted(result) - left
    if not dropped:
        return
    tracked(req).ahead = True
    state = state_of(req)
    if state.mamba_ping_pong_track_buffer is None:
        return
    end = req.seqlen - 1  # tokens with KV
    whole = SimpleNamespace(seqlen=end + dropped + 1)  # the request as the device knows it
    crossed, at = processor._mamba_check_track_boundary(whole, batch, _run(i, correct), i)
    keeps = batch.req_to_token_pool.get_mamba_ping_pong_keep_idx(req)
    if crossed and at > end and _written(batch, state, i) == keeps:
        state.mamba_last_track_seqlen = None


def may_file(original: Any, processor: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `_mamba_can_cache_finished_req`: our cache decides by `fileable`, and learns of the answer either way.

    SGLang drops the whole insertion instead: the request log and the forecast of reuse would not know the answer.
    """
    return hooks.coordinator_of(processor.tree_cache) is not None or original(processor, req, *args, **kwargs)


def spare_freed(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `set_mamba_track_indices_from_reqs`: give no slot to requests that ended, as 0.5.23 does.

    Where the scheduler takes in a step before it launches the next (a grammar that the algorithm cannot advance by
    itself), requests that just ended are still in the batch. Their row names slots that the cache may own by now.
    """
    freed = [i for i, req in enumerate(batch.reqs) if state_of(req).mamba_next_track_idx is None]
    if freed:
        batch.mamba_track_indices[freed] = -1  # the scatter leaves such rows out


def fileable(req: Any, length: int, tokens: int, buffered: bool) -> int:
    """The length under which the state of an ended request is filed, 0 for not at all.

    SGLang names `length` of the first `tokens` tokens. A `buffered` state is one of `length` tokens and may lie behind
    the key: in a stripped answer, or behind the stop, where nobody resumes. Others are the live one, which is at the
    end of the KV or, after a cut run, ahead of it. With --enable-linear-replayssm the recurrence of the live one lags
    behind: SGLang names the tokens that it has seen, but the convolution windows have seen all.
    """
    end = answered(req, tokens)
    if buffered:
        return length if length <= end else 0
    live = not tracked(req).ahead and length == tokens == end == state_of(req).kv_committed_len
    return length if live else 0


def _undrafted(result: Any) -> int:
    """Tokens of every run that no draft proposed; only newer versions have more than the last one."""
    return int(getattr(result, "num_non_draft_tokens_per_req", 1))


def _run(i: int, correct: int) -> SimpleNamespace:
    """The result of a run with `correct` drafts for request `i`, as SGLang's check of lines reads it."""
    return SimpleNamespace(
        num_correct_drafts_per_req_cpu={i: correct}, num_non_draft_tokens_per_req=1, grammar_retained_tokens=None
    )


def _written(batch: Any, state: Any, i: int) -> int:
    """The position of the slot that the step of request `i` wrote to."""
    for planned in (batch.mamba_lazy_spec_track_positions_cpu, getattr(batch, "mamba_track_buffer_indices", None)):
        if planned is not None:
            return int(planned[i])
    return int(state.mamba_next_track_idx)
