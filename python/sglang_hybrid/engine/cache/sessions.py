"""Streaming sessions: what they keep between turns goes where nobody could run beside it, and with a turn that is
retracted, and is at no node of the tree; turns that never ran end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import clock
from sglang_hybrid.engine.cache.hooks import coordinator_of
from sglang_hybrid.engine.cache.requests import namespace, streams

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""How long a session without a timeout keeps its memory from requests that wait, while others run."""


def relieve(result: tuple[Any, Any], scheduler: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """AFTER hook of Scheduler._get_new_batch_prefill_raw: one session gives up its row, KV and state if a request waits
    for memory and nobody runs, which no request would ever end. While others run, one that nobody seems to come back to
    does: otherwise they would take ever more of what requests run in.

    SGLang keeps them until the session is closed. Its next turn computes its whole history, as after a turn that was
    aborted. Every rank has the same sessions and requests, in the same order.
    """
    coordinator = coordinator_of(scheduler.tree_cache)
    batch, running = result
    if coordinator is None:
        return result
    name = None
    if coordinator.starved and batch is None and running.is_empty():
        coordinator.starved = False
        name = _longest_idle(scheduler) or _last_waiting(scheduler)
    elif running.batch_is_full and scheduler.waiting_queue:
        name = _longest_idle(scheduler, coordinator.now())
    if name is not None:
        scheduler.tree_cache.release_session(name)
        running.batch_is_full = False  # whoever waits is asked again
        coordinator.account.event("sessions_dropped")
        logger.warning("a request waits for memory: an idle streaming session gave up what it kept")
    return result


def _longest_idle(scheduler: Any, now: float | None = None) -> str | None:
    """The session whose last turn came first, of those with memory and no turn under way; with `now`, in seconds, of
    those without a timeout that were asked for their memory `IDLE_S` ago and had no turn since."""
    held, sessions = scheduler.tree_cache.session.slots, scheduler.session_controller.sessions
    idle = [name for name, session in sessions.items() if name in held and not session._inflight]
    if now is not None:
        idle = [name for name in idle if sessions[name].timeout is None and _asked_for_s(sessions[name], now) > IDLE_S]
    return min(idle, key=lambda name: sessions[name].last_active_time, default=None)


def _asked_for_s(session: Any, now: float) -> float:
    """Seconds since the idle `session` was first asked for its memory behind its last turn."""
    turn, since_s = getattr(session, "hybrid_asked", (None, now))
    if turn != session.last_active_time:
        turn, since_s = session.hybrid_asked = (session.last_active_time, now)
    return float(now - since_s)


def _last_waiting(scheduler: Any) -> str | None:
    """The session of the last turn that waits with memory of its session, behind the one that is to run next."""
    for req in reversed(scheduler.waiting_queue[1:]):
        if _keeps(scheduler, req):
            compat.detach_kv(req)  # it may have been matched already
            return str(req.session.session_id)
    return None


def _keeps(scheduler: Any, req: Any) -> bool:
    """Whether `req` is a turn whose session keeps memory of earlier ones."""
    sessions = getattr(scheduler.tree_cache, "session", None)  # where there are streaming ones
    return sessions is not None and streams(req) and req.session.session_id in sessions.slots


def end_turns(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of what drops requests from the queue, or before it: turns among them are no longer under way.

    SGLang lets a session have one turn at a time and waits for it before it closes the session; that of a client that
    hung up in the queue would never end. One that was refused beside another, which runs, has `to_finish` set.

    One that was matched has its session's memory already, and SGLang would take its end for that of an answer: its
    prompt would stand in the history of later turns. What stays in the queue is matched again.
    """
    if not scheduler.session_controller.sessions:  # the queue may be long
        return original(scheduler, *args, **kwargs)
    let_go(scheduler)
    turns = [req for req in (*scheduler.waiting_queue, *args) if streams(req) and req.to_finish is None]
    dropped = original(scheduler, *args, **kwargs)
    waiting = {id(req) for req in scheduler.waiting_queue}
    for req in turns:
        session = req.session  # None where SGLang has let it go
        if session is not None and (dropped is True if req in args else id(req) not in waiting):
            session.abort_req()
    return dropped


def keep_nothing(original: Callable[..., bool], sessions: Any, req: Any, *args: Any, **kwargs: Any) -> bool:
    """AROUND hook of StreamingSession.try_cache_finished_req: of a turn that is not over its session keeps nothing.

    SGLang takes a turn that is retracted for one that has ended. Nobody gets its memory then; another turn is let in
    beside it, into the same tokens; given up while it waits, it stands in the history of later turns; and with the
    overlap schedule its state has seen a token more than it resumes with. Here it begins anew, as any other request.
    """
    if not streams(req) or req.finished():
        return original(sessions, req, *args, **kwargs)
    return compat.leave_session(partial(original, sessions, req, *args, **kwargs), sessions, req)


def stay_under_way(_: Any, req: Any) -> None:
    """AFTER hook of Req.reset_for_retract: a turn that was retracted is still to be answered, before any other."""
    if streams(req):
        req.session._inflight = True


def prefetch(original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of Scheduler._prefetch_kvcache: nothing is read from storage for a turn whose session keeps what came
    before. SGLang looks for the node of the tree where that ends; there is none, and the scheduler would end."""
    return None if _keeps(scheduler, req) else original(scheduler, req, *args, **kwargs)


def first(original: Callable[..., Any], waiting: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of SchedulePolicy._sort_by_dfs_weight: turns that have their session's memory run before the others
    of the queue `waiting`, as they came. They are at no node of the tree: with 0.5.17 they would be gone from the queue
    for ever, later the scheduler would end."""
    turns: list[Any] = []
    others: list[Any] = []
    for req in waiting:
        (turns if streams(req) and not isinstance(req.last_node, int) else others).append(req)
    result = original(others, *args, **kwargs)
    waiting[:] = turns + others
    return result


def let_go(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of Scheduler.flush_cache: in a pause turns may wait that were matched already. What their sessions
    keep is not theirs any more: SGLang would go on from rows, pages and states that others have by then; 0.5.23 does
    not flush instead, as long as they wait."""
    if not scheduler.session_controller.sessions or scheduler.disaggregation_mode.value == "decode":
        return  # which matches before its queue
    for req in scheduler.waiting_queue:
        if _keeps(scheduler, req) and compat.state_of(req).req_pool_idx is not None:
            compat.detach_kv(req)


def change_key(scheduler: Any, req: Any) -> None:
    """BEFORE hook of Scheduler._abort_on_queued_limit, asked with every request: a turn with another adapter or salt
    than the last has nothing of its session's, which SGLang would go on from all the same."""
    if not streams(req) or req.to_finish is not None:
        return
    name, done = req.session.session_id, [node.req for node in req.session.req_nodes.values()]
    if done and namespace(done[-1]) != namespace(req) and name in scheduler.tree_cache.session.slots:
        scheduler.tree_cache.release_session(name)


def end_crowded_out(original: Callable[..., bool], scheduler: Any, req: Any) -> bool:
    """AROUND hook of Scheduler._abort_on_queued_limit, asked with every request: `end_turns` if the queue is full."""
    most = scheduler.max_queued_requests
    if most is None or len(scheduler.waiting_queue) < most:
        return original(scheduler, req)
    return bool(end_turns(original, scheduler, req))


def end_refused(original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of what refuses a request before it is in the queue, unless it says True: a turn is over then too."""
    is_turn = streams(req) and req.to_finish is None
    answer = original(scheduler, req, *args, **kwargs)
    if is_turn and answer is not True:
        req.session.abort_req()
    return answer


def reap(controller: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of SessionController.maybe_reap: with several ranks it acts in every step, which they take together.

    SGLang does it once a second by the clock of each rank: one has the memory of a closed session before another,
    admits other requests, and the server ends.
    """
    if clock.shared() is not None:
        controller._last_reap_time = float("-inf")


def is_timed_out(original: Callable[..., bool], session: Any) -> bool:
    """AROUND hook of Session.is_timed_out: with several ranks by the clock that they share."""
    time = clock.shared()
    if time is None or session.timeout is None:
        return original(session)
    used, since_s = getattr(session, "hybrid_used", (None, 0.0))
    if used != session.last_active_time:  # of this rank's own clock; that it changed is known to all
        used, since_s = session.hybrid_used = (session.last_active_time, time.now())
    return time.now() - since_s > session.timeout
