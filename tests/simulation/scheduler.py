"""SGLang's own scheduler in this process: its queue, admission, chunks, retraction and aborts, without HTTP or a model.

Requests arrive in SGLang's wire format, a step is one turn of its event loop, and the layers of the model are replaced
by `fingerprint`. So a thousand requests take a second, and an answer is wrong if any state or KV was.
"""

from __future__ import annotations

import dataclasses
import gc
import pickle
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from tests.simulation.drafting import FingerprintDraft, foresee
from tests.simulation.fingerprint import FingerprintModel
from tests.simulation.short_convolution import FingerprintConvolutions


def fingerprint_of(runner: Any) -> FingerprintModel:
    """What takes the place of the layers of the model in `runner`."""
    from sglang_hybrid.engine.cache.passes.prefill_states import is_short_convolution, linear_backend

    return (FingerprintConvolutions if is_short_convolution(linear_backend(runner)) else FingerprintModel)(runner)


class Clock:
    """Seconds of simulated time, set by whoever runs the day."""

    def __init__(self, now: float = 1000.0) -> None:
        self.seconds = now

    def now(self) -> float:
        return self.seconds


class Wire:
    """Both ends of a socket of SGLang's, in one process."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()

    def send(self, data: bytes, flags: int = 0) -> None:
        self._messages.append(data)

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int = 0) -> None:
        self.send(pickle.dumps(message))

    def recv(self, flags: int = 0) -> bytes:
        import zmq

        if not self._messages:
            raise zmq.ZMQError(zmq.EAGAIN)
        return self._messages.popleft()

    def recv_pyobj(self, flags: int = 0) -> Any:
        return pickle.loads(self.recv(flags))


class Outbox:
    """What the scheduler tells the HTTP process."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send_output(self, message: Any, request: Any = None) -> None:
        self.messages.append(message)


class SimulatedScheduler:
    """One rank. `finished` has the output tokens by request, None for one that was aborted.

    `verified` are rows of verifications and the tokens that they brought.
    """

    def __init__(self, server_args: Any, port_args: Any, rank: int, clock: Clock) -> None:
        from sglang.srt.managers import scheduler
        from sglang.srt.plugins import load_plugins

        load_plugins()
        scheduler.publish(
            server_args, role="scheduler", ranks=scheduler.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
        )
        scheduler.configure_scheduler_process(server_args, rank)
        self.scheduler: Any = scheduler.Scheduler(server_args, port_args)
        self.scheduler.idle_sleeper = None
        gc.collect()
        gc.freeze()  # SGLang collects garbage at every flush, and would walk over all it imported
        runner = self.scheduler.tp_worker.model_runner
        self.models = [runner.model]
        runner.model.forward = fingerprint_of(runner)
        worker = getattr(self.scheduler.draft_worker, "draft_worker", None)
        if worker is not None:
            reads = not runner.spec_algorithm.is_standalone()
            worker.draft_runner.model.forward = FingerprintDraft(worker.draft_runner, runner, reads)
            self.models.append(worker.draft_runner.model)
        elif self.scheduler.draft_worker is not None:
            foresee(self.scheduler.draft_worker, runner)
        self.clock = clock
        self.wire, self.outbox = Wire(), Outbox()
        self._connect()
        self._share_time()
        self.finished: dict[str, list[int] | None] = {}
        self.cached: dict[str, int] = {}
        self.admitted: list[str] = []
        self.counts: Counter[str] = Counter()
        self._told = 0
        self.verified, self.turns = [0, 0], 0
        self._overlaps = not server_args.disable_overlap_schedule
        self._results: deque[tuple[Any, Any]] = deque()
        self.scheduler.result_queue = self._results
        self._sampled: Any = None
        self._process, self.scheduler.process_batch_result = self.scheduler.process_batch_result, self._taken_in
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        from sglang.srt.managers.schedule_policy import PrefillAdder

        original = PrefillAdder.preempt_to_schedule

        def counted(*given: Any) -> bool:
            done = bool(original(*given))
            self.counts["preempted"] += done
            return done

        PrefillAdder.preempt_to_schedule = counted

    def _connect(self) -> None:
        held = self.scheduler
        if held.request_receiver.recv_from_tokenizer is not None:
            held.request_receiver = dataclasses.replace(
                held.request_receiver, recv_from_tokenizer=self.wire, recv_from_rpc=Wire()
            )
        held.ipc_channels = dataclasses.replace(
            held.ipc_channels, send_to_tokenizer=self.outbox, send_to_detokenizer=self.outbox
        )
        held.output_streamer = dataclasses.replace(held.output_streamer, send_to_detokenizer=self.outbox)
        held.batch_result_processor = dataclasses.replace(
            held.batch_result_processor, output_streamer=held.output_streamer
        )

    def _share_time(self) -> None:
        """Simulated time takes the place of the machine's: as the clock of the cache, or of the rank that stamps."""
        from sglang_hybrid.engine.cache import clock, hooks

        self.coordinator: Any = hooks.coordinator_of(self.scheduler.tree_cache)
        if clock._clock is not None:
            clock._clock.read = self.clock.now
        elif self.coordinator is not None:
            self.coordinator.now = self.coordinator.memory.now = self.clock.now

    def submit(self, rid: str, prompt: Sequence[int], new_tokens: int, stops: Sequence[int] = (), **more: Any) -> None:
        """A request for `new_tokens` greedy tokens behind `prompt`, at most up to the string of one of `stops`;
        `boundaries` become custom parameters."""
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        boundaries = more.pop("boundaries", None)
        sampling = SamplingParams(
            max_new_tokens=new_tokens, temperature=0, ignore_eos=True,
            stop=[self.scheduler.tokenizer.decode([token]) for token in stops] or None,
            custom_params={"cache_boundaries": list(boundaries)} if boundaries else None,
        )  # fmt: skip
        sampling.normalize(self.scheduler.tokenizer)
        request = io_struct.TokenizedGenerateReqInput(
            rid=rid, input_text=None, input_ids=array("q", prompt), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False, **more,
        )  # fmt: skip
        self._send(request)

    def abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._send(AbortReq(rid=rid))

    def flush(self) -> None:
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        self._send(FlushCacheReqInput())

    def pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._send(PauseGenerationReqInput(mode=mode))  # type: ignore[arg-type]

    def go(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._send(ContinueGenerationReqInput())

    def shut_down(self) -> None:
        """All ranks leave their loop."""
        from sglang.srt.managers.io_struct import ShutdownReq

        self._send(ShutdownReq())

    def _send(self, message: Any) -> None:
        from sglang.srt.managers import io_struct

        io_struct.sock_send(self.wire, message)  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting_queue)

    def step(self) -> Any | None:
        """One turn of SGLang's event loop; returns the batch that ran."""
        held = self.scheduler
        self.turns += 1
        held.ingest_requests()
        if held._engine_paused:
            self._read_outbox()
            return None
        plan = held.get_next_batch_to_run(running_batch=held.running_batch, last_batch=held.last_batch)
        held.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            if batch.forward_mode.is_extend():
                self._admit(zip(batch.reqs, batch.prefix_lens, strict=True))
            if self._overlaps:
                self._launch(batch)
            else:
                held.process_batch_result(batch, held.run_batch(batch))
        elif not self._results:
            held.on_idle()
        if self._overlaps:
            self._settle(1 if batch else 0)
        held.last_batch = batch
        self._read_outbox()
        return batch

    def _launch(self, batch: Any) -> None:
        held = self.scheduler
        if self._results and held.is_disable_overlap_for_batch(batch, last_batch=held.last_batch):
            self._settle(0)
        result = held.run_batch(batch)
        self._results.append((batch.copy(), result))
        self._sampled = (batch, result)

    def _settle(self, ahead: int) -> None:
        """Take in the results of passes, but for the last `ahead`."""
        held = self.scheduler
        while len(self._results) > ahead:
            batch, result = self._results.popleft()
            held.process_batch_result(batch, result)
        if ahead and self._sampled is not None:
            held.launch_batch_sample_if_needed(self._sampled[1], self._sampled[0])
            self._sampled = None

    def _admit(self, prefixes: Iterable[tuple[Any, int]]) -> None:
        for request, prefix in prefixes:
            if request.rid not in self.cached:
                self.cached[request.rid] = prefix
                self.admitted.append(request.rid)

    def _taken_in(self, batch: Any, result: Any) -> None:
        """The answers of a pass, which SGLang itself takes in where a pause begins."""
        requests = list(batch.reqs)
        if getattr(result, "accept_lens", None) is not None:
            self.verified[0] += len(requests)
            self.verified[1] += int(result.accept_lens.sum())
        self._process(batch, result)
        for request in requests:
            if request.finished() and request.rid not in self.finished:
                aborted = type(request.finished_reason).__name__ == "FINISH_ABORT"
                self.finished[request.rid] = None if aborted else list(request.output_ids_through_stop)

    def _read_outbox(self) -> None:
        for message in self.outbox.messages[self._told :]:
            kind = type(message).__name__
            self.counts[kind] += 1
            if kind == "AbortReq":
                self.finished.setdefault(message.rid, None)
        self.outbox.messages.clear()
