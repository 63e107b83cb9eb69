"""How SGLang's scheduler sizes the pass of a prompt with segments: by the tokens it runs, not by those it advances.

SGLang counts a prompt's length against the tokens of a pass. Here a pass may advance over thousands of tokens that are
copied, or run more than it advances because it makes segments. So the budgets are set to what lets SGLang choose the
pass that was decided on, and then charged what it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.engine.segments.composer import Composer
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt

_ALL = 1 << 40
"""More tokens than any pass has."""


def admit(composer: Composer, original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """PrefillAdder.add_one_req for a request that marks segments."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    prompt = composer.prompt(req)
    assert prompt is not None
    if not _begin(composer, prompt, req, adder):
        return AddReqResult.OTHER
    before = len(adder.can_run_list)
    with _as_decided(prompt, req, adder):
        result = original(adder, req, *args, **kwargs)
        admitted = len(adder.can_run_list) > before
        if admitted:
            _follow(composer, prompt, req)
    if not admitted:
        prompt.revoke(composer.index)
        return result
    return adder.budget_state()


def continue_chunk(composer: Composer, original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """PrefillAdder.add_chunked_req for a request that marks segments: returns it while its prompt is not done."""
    prompt = composer.prompt(req)
    assert prompt is not None
    room = adder.memory_budget.available_chunk_tokens(_ALL)
    if not _begin(composer, prompt, req, adder, room):
        return req
    with _as_decided(prompt, req, adder):
        result = original(adder, req)
        if adder.can_run_list and adder.can_run_list[-1] is req:
            _follow(composer, prompt, req)
        else:
            prompt.revoke(composer.index)
    return result


def _begin(composer: Composer, prompt: SegmentedPrompt, req: Any, adder: Any, room: int = _ALL) -> bool:
    """Decide on the request's next pass, for which there is `room` tokens of KV; whether there is one."""
    tokens = adder.rem_chunk_tokens
    if tokens is None:
        tokens = adder.rem_input_tokens if adder.can_run_list else _ALL
    elif adder.chunked_req_limit is not None:
        tokens = min(tokens, adder.chunked_req_limit)
    page, start, total = composer.served.page_size, len(req.prefix_indices), len(req.full_untruncated_fill_ids)
    if start + room < total:
        total = (start + room) // page * page
    limits = Limits(max(0, tokens), composer.served.most, page)
    return prompt.begin(start, total, limits, composer.index, composer.now()) is not None


@contextmanager
def _as_decided(prompt: SegmentedPrompt, req: Any, adder: Any) -> Iterator[None]:
    """Let SGLang choose the open pass of `prompt`; what it charged for it is set right afterwards."""
    made = prompt.open
    assert made is not None
    chunk, inputs, limit = adder.rem_chunk_tokens, adder.rem_input_tokens, adder.chunked_req_limit
    whole = made.end >= len(req.full_untruncated_fill_ids)
    if chunk is not None:
        adder.rem_chunk_tokens = _ALL if whole else made.end - made.start
        adder.chunked_req_limit = None
    adder.rem_input_tokens = _ALL
    try:
        yield
    finally:
        run = 0 if prompt.open is None else prompt.open.run_tokens
        adder.rem_chunk_tokens = None if chunk is None else chunk - run
        adder.rem_input_tokens, adder.chunked_req_limit = inputs - run, limit


def _follow(composer: Composer, prompt: SegmentedPrompt, req: Any) -> None:
    """Where memory was short SGLang chose a shorter pass: decide on that one."""
    end = int(req.extend_range.end)
    if prompt.open is not None and prompt.open.end == end:
        return
    limits = Limits(_ALL, _ALL, 1)
    made = prompt.begin(len(req.prefix_indices), end, limits, composer.index, composer.now())
    if made is None or made.end != end:
        raise InvariantError(f"request {req.rid}: a pass up to {end} was asked for, but this one found: {made}")


def most_tokens(chunked_prefill_size: int | None) -> int:
    """Tokens of the largest pass."""
    return _ALL if not chunked_prefill_size or chunked_prefill_size < 0 else min(_ALL, math.floor(chunked_prefill_size))
