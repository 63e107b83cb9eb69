"""One speculating request on a tiny device: the lengths of its states, and SGLang's scheduler that has to know them."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.cache.requests import answered
from sglang_hybrid.engine.speculation import guards


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request of `prompt` tokens whose verifications accept `runs`; of the last its grammar leaves `kept`.

    `stop` ends it that many tokens before the end of what was kept, `strip` keeps its answer out of the key.
    `in_flight` is what the step that the overlap schedule has launched by then accepts, 0 without that schedule.
    `drafts` is the most that a run can have, `grid` the distance of the lines. `short` says which of the slots asked
    for on the way cannot be had, in their order: only extra_buffer_lazy asks for any.
    """

    prompt: int
    runs: tuple[int, ...]
    kept: int
    grid: int
    drafts: int
    stop: int = 0
    in_flight: int = 0
    strip: bool = False
    strategy: str = "extra_buffer"
    short: tuple[bool, ...] = ()

    @property
    def end(self) -> int:
        return self.prompt + sum(self.runs[:-1]) + self.kept


def bare(owner: Any, name: str) -> Callable[..., Any]:
    """SGLang's own function, without hooks."""
    return inspect.unwrap(getattr(owner, name))  # type: ignore[no-any-return]


def settings(patch: pytest.MonkeyPatch, case: Case) -> None:
    """What SGLang's functions ask its server for, in every version."""
    from sglang.srt.managers.scheduler_components import batch_result_processor as results
    from sglang.srt.speculative import spec_utils

    lazy = case.strategy == "extra_buffer_lazy"
    executor = SimpleNamespace(
        mamba=SimpleNamespace(mamba_track_interval=case.grid, enable_mamba_extra_buffer_lazy=lazy)
    )
    answers = {
        "get_exec": lambda: executor,
        "get_server_args": lambda: SimpleNamespace(
            enable_mamba_extra_buffer_lazy=lambda: lazy,
            mamba_track_interval=case.grid,
            max_speculative_num_draft_tokens=case.drafts,
        ),
        "mamba_track_grid": lambda page: case.grid,
        "max_speculative_num_draft_tokens": lambda: case.drafts,
    }
    for module in (results, spec_utils):
        for name, answer in answers.items():
            if hasattr(module, name):
                patch.setattr(module, name, answer)


def processor(guarded: bool) -> Any:
    """SGLang's processor of results, with our hooks around it or without any."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor as Owner

    check, update = bare(Owner, "_mamba_check_track_boundary"), bare(Owner, "_mamba_prefix_cache_update")

    class Processor(Owner):  # type: ignore[misc]
        tree_cache = SimpleNamespace(page_size=1, supports_mamba=lambda: True)

        def __init__(self) -> None:
            pass

        def _mamba_check_track_boundary(self, *args: Any) -> Any:
            return guards.boundary(check, self, *args) if guarded else check(self, *args)

        def _mamba_prefix_cache_update(self, *args: Any) -> None:
            update(self, *args)
            if guarded:
                guards.settle(None, self, *args)

    return Processor()


class Simulation:
    """Runs a case; `length_of` says of how many tokens the state in a slot is, `live` those of the request's own."""

    def __init__(self, case: Case, guarded: bool = True) -> None:
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool as Pool

        self.case, self.processor = case, processor(guarded)
        self.lazy = case.strategy == "extra_buffer_lazy"
        self.two = self.lazy or bool(case.in_flight)
        self.length_of: dict[int, int] = {}
        self.live = case.prompt
        self._slots, self._short = iter(range(10, 10_000)), iter(case.short)
        self.pool: Any = SimpleNamespace(
            mamba_ping_pong_track_buffer_size=2 if self.two else 1,
            enable_mamba_extra_buffer_lazy=self.lazy,
            mamba_pool=SimpleNamespace(replayssm_write_pos=None),
            mamba_allocator=SimpleNamespace(alloc=self._alloc, free=self._free),
            set_mamba_ping_pong_slot=self._set_slot,
        )
        for name in ("get_mamba_ping_pong_keep_idx", "get_mamba_ping_pong_other_idx"):
            setattr(self.pool, name, bare(Pool, name).__get__(self.pool))
        self.req = self._request()

    def _request(self) -> Any:
        import torch

        case, req = self.case, SimpleNamespace(rid="r", finished_reason=None, finished_len=None, output_ids=array("q"))
        req.kv = req  # SGLang 0.5.17 keeps on the request what newer ones keep there
        req.origin_input_ids = array("q", range(case.prompt))
        req.finished = lambda: req.finished_reason is not None
        req.owned_kv_len = lambda: self.key
        req.output_ids.append(0)  # from the prefill; it has no KV yet
        req.seqlen, req.kv_committed_len = case.prompt + 1, case.prompt
        req.mamba_pool_idx = torch.tensor(1)
        req.mamba_lazy_is_insert = req.mamba_lazy_checkpoint = True
        req.mamba_last_track_seqlen = req.mamba_prev_track_seqlen = None
        req.mamba_next_track_idx, req.mamba_last_track_idx = 0, 1 if self.two and not self.lazy else 0
        req.mamba_ping_pong_empty = [False, self.lazy]
        slots = [next(self._slots), -1 if self.lazy else next(self._slots)]
        req.mamba_ping_pong_track_buffer = (
            None if case.strategy == "no_buffer" else torch.tensor(slots[: 2 if self.two else 1])
        )
        return req

    def _alloc(self, count: int) -> Any:
        import torch

        return None if next(self._short, False) else torch.tensor([next(self._slots)])

    def _free(self, slots: Any) -> None:
        self.length_of[int(slots[0])] = -1  # whoever has it next

    def _set_slot(self, req: Any, position: int, slot: Any) -> None:
        req.mamba_ping_pong_track_buffer[position] = int(slot)
        req.mamba_ping_pong_empty[position] = int(slot) == -1

    def launch(self, accepted: int) -> Any:
        """Prepare a verification and let the device run it; the scheduler does not know yet what it `accepted`."""
        import torch
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative import spec_utils

        case, req, plan = self.case, self.req, None
        batch = SimpleNamespace(
            reqs=[req],
            seq_lens=torch.tensor([self.live]),
            tree_cache=SimpleNamespace(page_size=1),
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
            req_to_token_pool=self.pool,
            mamba_track_buffer_indices=None,
            mamba_lazy_spec_track_positions_cpu=None,
            mamba_track_indices=None,
        )
        if self.lazy:
            bare(ScheduleBatch, "mamba_lazy_spec_prepare")(batch, case.grid, case.drafts)
            plan = batch.mamba_lazy_spec_track_positions_cpu
        if req.mamba_ping_pong_track_buffer is not None:
            slot = req.mamba_ping_pong_track_buffer[plan[0] if plan else req.mamba_next_track_idx]
            batch.mamba_track_indices = slot.reshape(1)
        index = torch.full((1, case.drafts), -1)
        index[0, :accepted] = torch.arange(accepted)
        last, at = spec_utils._verify_commit_step_indices(
            batch=batch, accept_index=index, accept_lens=torch.tensor([accepted]), draft_token_num=case.drafts
        )
        if at is not None and int(at[0]) >= 0:
            self.length_of[int(batch.mamba_track_indices[0])] = self.live + int(at[0]) + 1
        self.live += int(last[0]) + 1
        return batch

    def take_in(self, batch: Any, accepted: int, kept: int, ends: bool) -> None:
        """The scheduler learns that a run was `accepted` and keeps `kept` tokens of it."""
        req = self.req
        req.output_ids.extend([0] * kept)
        req.seqlen += kept
        req.kv_committed_len += kept
        result = SimpleNamespace(
            num_correct_drafts_per_req_cpu=[accepted - 1],
            num_non_draft_tokens_per_req=1,
            grammar_retained_tokens=[list(range(kept))] if kept != accepted else None,
        )
        self.result = result
        if ends:
            req.finished_reason = "stop"
            req.finished_len = len(req.output_ids) - self.case.stop if self.case.stop else None
        self.processor._mamba_prefix_cache_update(req, batch, result, 0)

    def run(self) -> None:
        """All runs, as the event loop of the schedule orders them."""
        *earlier, last = self.case.runs
        steps = [(accepted, accepted, False) for accepted in earlier] + [(last, self.case.kept, True)]
        if not self.case.in_flight:
            for accepted, kept, ends in steps:
                self.take_in(self.launch(accepted), accepted, kept, ends)
            return
        batch = self.launch(steps[0][0])
        for (accepted, kept, ends), following in zip(steps, [*self.case.runs[1:], self.case.in_flight], strict=True):
            batch, before = self.launch(following), batch
            self.take_in(before, accepted, kept, ends)

    @property
    def key(self) -> int:
        """Tokens that SGLang inserts at most; 0.5.23 leaves out what is behind the stop."""
        from sglang.srt.managers.schedule_batch import Req

        if self.case.strip:
            return self.case.prompt
        committed = int(self.req.kv_committed_len)
        newer = "output_ids_through_stop" in (
            inspect.getsource(Req.owned_kv_len) if hasattr(Req, "owned_kv_len") else ""
        )
        return min(committed, answered(self.req, committed)) if newer else committed

    def filed(self, guarded: bool = True) -> tuple[int, int]:
        """The length under which the state of the ended request is inserted, 0 for none, and its true one.

        What the coordinator is told is in `self.told`: tokens of the request, and how many of them are cached.
        """
        from sglang.srt.mem_cache.unified_cache.components import MambaComponent

        from sglang_hybrid.engine.cache.components import HybridMamba

        req, told = self.req, []
        component: Any = object.__new__(HybridMamba)
        component.cache = SimpleNamespace(
            enable_mamba_extra_buffer=self.case.strategy != "no_buffer", req_to_token_pool=self.pool
        )
        component.coordinator = SimpleNamespace(
            finish=lambda req, record, tokens, cached: told.append((tokens, cached)), cached_tokens=lambda record: 0
        )
        params, key = SimpleNamespace(mamba_value=None), self.key
        prepare = HybridMamba.prepare_for_caching_req if guarded else bare(MambaComponent, "prepare_for_caching_req")
        length = min(key, prepare(component, req, params, key, True) or 0)  # SGLang inserts the lesser of the two
        self.told = told[0] if told else None
        if not (req.mamba_lazy_is_insert and req.mamba_lazy_checkpoint) or not length:
            return 0, 0
        if self.case.strategy == "no_buffer":
            newer = None if guarded else getattr(type(self.processor), "_mamba_can_cache_finished_req", None)
            filed = newer is None or inspect.unwrap(newer)(self.processor, req, self.result, 0)
            return (length, self.live) if filed else (0, 0)
        return length, self.length_of.get(int(params.mamba_value), -1)


def outcome(case: Case, guarded: bool = True) -> tuple[int, int]:
    """What is filed of `case`: the length that the cache is told, and the true one."""
    with pytest.MonkeyPatch.context() as patch:
        settings(patch, case)
        simulation = Simulation(case, guarded)
        simulation.run()
        return simulation.filed(guarded)
