"""How SGLang's scheduler sizes the pass of a prompt with segments: by the tokens it runs, not by those it advances.

SGLang counts a prompt's length against the tokens of a pass. Here a pass may advance over thousands of tokens that are
copied, or run more than it advances because it makes segments. So the budgets are set to what lets SGLang choose the
pass that was decided on, and then charged what it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.segments.composer import Composer
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt

_ALL = 1 << 40
"""More tokens than any pass has."""


def admit(
    composer: Composer,
    original: Callable[..., Any],
    adder: Any,
    req: Any,
    has_chunked_req: bool,
    *rest: Any,
    **named: Any,
) -> Any:
    """PrefillAdder.add_one_req for a request that marks segments."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    prompt = composer.prompt(req)
    assert prompt is not None
    with composer.memory.kept(req):
        begun = _begin(composer, prompt, req, adder)
    if not begun:
        return AddReqResult.OTHER
    if (has_chunked_req or adder.new_chunked_req is not None) and not _ends(prompt, req):
        # SGLang has one prompt in chunks at a time: of two it forgets one, and answers it from its first chunk.
        prompt.revoke(composer.index)
        return AddReqResult.OTHER
    result, admitted = _offer(
        composer, prompt, req, adder, lambda: original(adder, req, has_chunked_req, *rest, **named)
    )
    return adder.budget_state() if admitted else result


def continue_chunk(composer: Composer, original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """PrefillAdder.add_chunked_req for a request that marks segments: returns it while its prompt is not done."""
    prompt = composer.prompt(req)
    assert prompt is not None
    if not composer.memory.room_for_chunk(adder, req):
        return req
    room = adder.memory_budget.available_chunk_tokens(_ALL)
    if not _begin(composer, prompt, req, adder, room):
        return req
    return _offer(composer, prompt, req, adder, lambda: original(adder, req))[0]


def _begin(composer: Composer, prompt: SegmentedPrompt, req: Any, adder: Any, room: int = _ALL) -> bool:
    """Decide on the request's next pass, for which there is `room` tokens of KV; whether there is one."""
    tokens = adder.rem_chunk_tokens
    if tokens is None:
        tokens = adder.rem_input_tokens if adder.can_run_list else _ALL
    elif adder.chunked_req_limit is not None:
        tokens = min(tokens, adder.chunked_req_limit)
    room = min(room, composer.memory.granted_tokens)
    page, start, total = composer.served.page_size, compat.prefix_tokens(req), len(req.full_untruncated_fill_ids)
    if start + room < total:
        total = (start + room) // page * page
    limits = Limits(max(0, tokens), composer.served.most, page)
    return prompt.begin(start, total, limits, composer.index, composer.now()) is not None


def _offer(
    composer: Composer, prompt: SegmentedPrompt, req: Any, adder: Any, choose: Callable[[], Any]
) -> tuple[Any, bool]:
    """Let SGLang `choose` the open pass of `prompt`, and charge it what it runs; whether it was chosen."""
    made = prompt.open
    assert made is not None
    chunk, inputs, limit = adder.rem_chunk_tokens, adder.rem_input_tokens, adder.chunked_req_limit
    whole, before = _ends(prompt, req), len(adder.can_run_list)
    if chunk is not None:
        adder.rem_chunk_tokens = _ALL if whole else made.end - made.start
        adder.chunked_req_limit = None
    adder.rem_input_tokens = _ALL
    run, rest = 0, chunk
    try:
        result = choose()
        admitted = len(adder.can_run_list) > before
        if admitted:
            run = _followed(composer, prompt, req).run_tokens
            whole = _ends(prompt, req)
            # SGLang has one prompt in chunks at a time, and relies on it to use up the pass: nobody may begin behind.
            # So what is left is in whole pages, of which the next one may use up all.
            rest = None if chunk is None else chunk - adder.ceil_paged_tokens(run) if whole else 0
    finally:
        adder.rem_chunk_tokens, adder.rem_input_tokens, adder.chunked_req_limit = rest, inputs - run, limit
    if not admitted:
        prompt.revoke(composer.index)
    return result, admitted


def _ends(prompt: SegmentedPrompt, req: Any) -> bool:
    """Whether the open pass of `prompt` is its last."""
    return prompt.open is not None and prompt.open.end >= len(req.full_untruncated_fill_ids)


def _followed(composer: Composer, prompt: SegmentedPrompt, req: Any) -> Pass:
    """The open pass; where memory was short SGLang chose a shorter one, and that is decided on now."""
    end = compat.pass_end(req)
    made = prompt.open
    if made is None or made.end != end:
        made = prompt.begin(compat.prefix_tokens(req), end, Limits(_ALL, _ALL), composer.index, composer.now())
    if made is None or made.end != end:
        raise InvariantError(f"request {req.rid}: a pass up to {end} was asked for, but this one found: {made}")
    return made


def most_tokens(chunked_prefill_size: int | None) -> int:
    """Tokens of the largest pass."""
    return _ALL if not chunked_prefill_size or chunked_prefill_size < 0 else chunked_prefill_size
