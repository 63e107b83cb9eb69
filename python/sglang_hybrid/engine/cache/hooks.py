"""The places in SGLang, outside its cache components, at which the cache has a say."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sglang_hybrid.engine.cache.coordinator import CacheCoordinator
from sglang_hybrid.engine.cache.requests import Tracked, tracked
from sglang_hybrid.engine.segments import schedule

_allocators: WeakSet[Any] = WeakSet()
"""SGLang's allocators of state slots whose cache is ours."""


def activate(coordinator: CacheCoordinator) -> None:
    """Let the hooks act for `coordinator`, whose cache is built."""
    _allocators.add(coordinator.memory.states)


def coordinator_of(cache: Any) -> CacheCoordinator | None:
    """The coordinator of a cache, None for caches that are not ours."""
    from sglang_hybrid.engine.cache.radix_cache import MambaRadixCache

    return cache.coordinator if isinstance(cache, MambaRadixCache) else None


def plan(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """A prefill batch was put together."""
    coordinator = coordinator_of(batch.tree_cache)
    if coordinator is not None:
        coordinator.plan(batch)


def admit(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Do not admit a request whose states cannot be had: SGLang would find out by an assertion."""
    coordinator = coordinator_of(adder.tree_cache)
    if coordinator is None:
        return original(adder, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    result, memory = AddReqResult.NO_TOKEN, coordinator.memory
    has_room = memory.room_for(adder, req)
    if has_room:
        with memory.restoring(req, int(adder.page_size)):
            if coordinator.composer is not None and coordinator.composer.prompt(req) is not None:
                result = schedule.admit(coordinator.composer, original, adder, req, *args, **kwargs)
            else:
                result = original(adder, req, *args, **kwargs)
    # SGLang frees the slot of one that waits, but leaves it to a turn of a session, which would start from what is in
    # it if what it matched is evicted meanwhile.
    if req not in adder.can_run_list[-1:] and memory.let_go(req) and not has_room:
        coordinator.account.event("waited_for_states")
    # SGLang asks again after NO_TOKEN once a running request ends; with none running it never would.
    short = result == AddReqResult.NO_TOKEN and nobody_runs(adder)
    coordinator.starved = short and not adder.can_run_list
    return AddReqResult.OTHER if short else result


def keep_preempted(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a request wait again that gave its memory to a more urgent one which was not admitted, as 0.5.23 does.

    SGLang puts it back into the queue only if anybody was admitted; nobody would ever run or answer it.
    """
    if not scheduler.enable_priority_preemption:
        return original(scheduler, *args, **kwargs)
    ran = list(kwargs["running_batch"].reqs)
    batch, running = original(scheduler, *args, **kwargs)
    if batch is None:
        known = {id(req) for req in (*running.reqs, *scheduler.waiting_queue)}
        for req in ran:
            if id(req) not in known:
                scheduler._add_request_to_queue(req)
    return batch, running


def set_aside(original: Any, slots: Any, count: int) -> None:
    """Take no slots out of the pool ahead of a walk through the queue, one for each of `count` waiting requests.

    Whoever asks for memory during the walk would count them as used: with a long queue no request could be admitted,
    although nothing runs. What SGLang saves by it are two views of a tensor for each request.
    """
    if slots not in _allocators:
        original(slots, count)


def admissible(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    """What SGLang says of its sizes, with a longest prompt that can be admitted, and answers whose drafts fit too.

    SGLang admits what fits in whole pages, and leaves a page and a token beside them. It accepts prompts that do not:
    they, and whoever is behind them, wait for ever. One that leaves the page alone is answered by token 0, uncomputed.

    Drafts are verified behind an answer. Where it ends right before the context's end they lie behind that: a step
    sets KV aside in the row of another request, whose KV is lost then, and attention reads behind its tables. Where it
    ends right before that of all KV, no step has KV for its drafts, and SGLang gives the answer up.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    tokens, most, longest, page = info[0], info[4], info[5], worker.model_runner.token_to_kv_pool_allocator.page_size
    runs = get_alloc_reserve_per_decode()  # tokens of the step that is verified, and of the next one
    if runs > 2:  # otherwise nothing is drafted
        most -= runs - 1
        longest = min(longest, most - (info[4] - info[5]))
    if info[4] < tokens:  # otherwise the pages of a prompt are spread over ranks
        longest = min(longest, (tokens - page - 2) // page * page + 1)  # the first length that is refused
    return (*info[:4], most, longest, *info[6:])


def nobody_runs(adder: Any) -> bool:
    """Whether no request is in its decode."""
    return adder.running_batch is None or bool(adder.running_batch.is_empty())


def details(result: dict[str, Any] | None, _: Any, req: Any) -> dict[str, Any] | None:
    """What an output says of the cache, with the first and the last one of `req` also why tokens missed.

    An answer that streams has an output for every token, and to say it in each would cost more than SGLang's own part
    of it. `frontend.reporting.usage` keeps what the first said.
    """
    record = tracked(req)
    if record.explained and not req.finished():
        return result
    record.explained = True
    return explained(result, record)


def explained(result: dict[str, Any] | None, record: Tracked) -> dict[str, Any] | None:
    """Add why tokens missed to what SGLang says of a request's cached tokens: `miss_<reason>`, in tokens.

    `written` are the tokens of the prompt behind those it skipped, up to the last checkpoint it has saved so far, and
    `segment_tokens` those that reused segments stand for.
    """
    if record.told is not None:
        return {**(result or {"device": 0, "host": 0}), **record.told}
    if record.misses is None or record.request is None:
        return result
    written = min(record.saved_tokens, record.request.prompt_tokens) - record.request.cached_tokens
    said = {f"miss_{reason}": count for reason, count in record.misses.items()}
    if record.segments:
        said["segment_tokens"] = record.segments.reused_tokens
    return {**(result or {"device": 0, "host": 0}), **said, "written": max(0, written)}
