"""Schedulers of pairs: what they hand over beside KV and states, and what does not end them."""

from __future__ import annotations

import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sglang_hybrid.engine.cache.hooks import details
from sglang_hybrid.engine.cache.requests import tracked
from sglang_hybrid.engine.pairs import checksums, connections, guards, indices, misses
from sglang_hybrid.prefix.misses import REASONS
from tests.engine.support import eventually
from tests.versions import since

MANY = since("0.5.21", "pairs that hand over more than 8 top log-probabilities")


def buffers() -> Any:
    """SGLang's own; the plugins of the session hook what writes into them."""
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(4, 8, torch.float32, 8)


def prefilled(cached: int, reasons: dict[str, int] | None, prompt: int = 100, saved: int = 90) -> Any:
    """A request whose last chunk is computed."""
    req: Any = SimpleNamespace(
        metadata_buffer_index=2, output_ids=array("q", [5]), cached_tokens=cached, cached_tokens_device=cached,
        cached_tokens_host=0, cached_tokens_storage=0, multimodal_inputs=None, return_logprob=False,
        return_sampling_mask=False, hidden_states_tensor=None, bootstrap_room=77,
        get_mm_token_counts=lambda: (0, 0, 0),  # 0.5.23 asks
    )  # fmt: skip
    if reasons is not None:
        record: Any = tracked(req)
        record.misses, record.saved_tokens = reasons, saved
        record.request = SimpleNamespace(prompt_tokens=prompt, cached_tokens=cached)
    return req


def handed_over(req: Any) -> dict[str, Any] | None:
    """What the server that decodes says of the request."""
    rows = buffers()
    rows.set_buf(req)  # the registered hook writes our part
    taken: Any = SimpleNamespace()
    queue = SimpleNamespace(metadata_buffers=rows)
    misses.take(None, queue, SimpleNamespace(metadata_buffer_index=2, req=taken))
    return details({"device": req.cached_tokens, "host": 0}, None, taken)


def test_every_reason_is_handed_over_but_those_of_segments_which_pairs_refuse() -> None:
    reasons = {reason: 3 + at for at, reason in enumerate(REASONS) if not reason.startswith("segment_")}
    assert len(reasons) == 8
    told = handed_over(prefilled(8, reasons, prompt=1000, saved=60))
    assert told == {"device": 8, "host": 0, **{f"miss_{name}": count for name, count in reasons.items()}, "written": 52}


def test_reasons_without_tokens_are_not_named() -> None:
    told = handed_over(prefilled(64, {"never_seen": 36}))
    assert told == {"device": 64, "host": 0, "miss_never_seen": 36, "written": 26}


def test_a_server_without_our_cache_hands_over_nothing() -> None:
    assert handed_over(prefilled(64, None)) == {"device": 64, "host": 0}


def test_what_an_earlier_request_left_in_a_row_is_overwritten() -> None:
    rows = buffers()
    rows.set_buf(prefilled(8, dict.fromkeys(REASONS, 9)))
    rows.set_buf(prefilled(8, None))
    assert rows.cached_tokens[2, misses.FIRST :].tolist() == [0] * 9
    assert rows.cached_tokens[2, :2].tolist() == [8, 8], "SGLang's own counts stay"


def test_a_check_of_health_hands_over_nothing() -> None:
    rows, req = buffers(), SimpleNamespace()
    rows.cached_tokens[2] = 5  # of an earlier request
    queue = SimpleNamespace(metadata_buffers=rows)
    misses.take(None, queue, SimpleNamespace(metadata_buffer_index=2, req=req))
    assert tracked(req).told is None


def test_there_is_room_for_all() -> None:
    assert misses.FIRST + len(misses.NAMES) == buffers().cached_tokens.shape[1]


@pytest.fixture
def pools() -> tuple[Any, list[Any]]:
    import torch
    from sglang.srt.disaggregation.checksum import KvChecksumComputer

    kv = [torch.arange(5 * 16, dtype=torch.uint8).reshape(5, 16) + at for at in range(4)]
    states = [torch.arange(3 * 24, dtype=torch.uint8).reshape(3, 24) + at for at in range(2)]
    computer = KvChecksumComputer(
        torch.device("cpu"),
        [each.data_ptr() for each in kv],
        [16] * 4,
        [[each.data_ptr() for each in states]],
        [[24] * 2],
    )
    return computer, [*kv, *states]


@since("0.5.21", "checksums of what pairs hand over")
def test_a_sum_is_over_the_pages_and_the_state_of_a_prompt(pools: tuple[Any, list[Any]]) -> None:
    import torch

    computer, tensors = pools
    found = computer.compute(torch.tensor([3, 1]), torch.tensor([2]))
    parts = [each[[3, 1]].numpy().tobytes() for each in tensors[:4]] + [
        each[2].numpy().tobytes() for each in tensors[4:]
    ]
    assert found == zlib.crc32(b"".join(parts)) | 1 << 32
    assert computer.compute(torch.tensor([1, 3]), torch.tensor([2])) != found, "in this order"
    for tensor in tensors:
        tensor[4 if len(tensor) > 3 else 0, 5] += 1
        assert computer.compute(torch.tensor([3, 1]), torch.tensor([2])) == found, "another page, another slot"
        tensor[1 if len(tensor) > 3 else 2, 15] += 1
        changed = computer.compute(torch.tensor([3, 1]), torch.tensor([2]))
        assert changed != found
        found = changed


@since("0.5.21", "checksums of what pairs hand over")
def test_a_sum_is_never_none(monkeypatch: pytest.MonkeyPatch, pools: tuple[Any, list[Any]]) -> None:
    import torch

    monkeypatch.setattr(checksums, "zlib", SimpleNamespace(crc32=lambda *_: 0))
    assert pools[0].compute(torch.tensor([0]), torch.tensor([0])), "SGLang takes 0 for a server that computes none"


class Prefills:
    """A scheduler that prefills, as far as one that decodes connects to it, and SGLang's receiver of its KV."""

    def __init__(self, manager: Any, address: str) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        self.socket = zmq.Context.instance().socket(zmq.PULL)
        scheduler = {"rank_ip": "127.0.0.1", "rank_port": self.socket.bind_to_random_port("tcp://127.0.0.1")}
        manager.connection_pool[f"{address}_0_0_0"] = [scheduler]
        manager.prefill_info_table[address] = "what it is"
        self.receiver: Any = SimpleNamespace(
            kv_mgr=manager,
            bootstrap_addr=address,
            bootstrap_infos=[scheduler],
            _connect_to_bootstrap_server=CommonKVReceiver._connect_to_bootstrap_server,
        )
        connections.watch(None, self.receiver)
        self.end = CommonKVReceiver._connect_to_bootstrap_server(scheduler)[0]


@pytest.fixture
def decodes() -> Iterator[Any]:
    """What a scheduler that decodes knows of those that prefill, which `met` adds."""
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    manager: Any = SimpleNamespace(connection_lock=threading.Lock(), connection_pool={}, prefill_info_table={})
    made: list[Prefills] = []

    def met(address: str = "10.0.0.1:8998") -> Prefills:
        made.append(Prefills(manager, address))
        return made[-1]

    manager.met = met
    yield manager
    for each in made:
        each.socket.close()
        CommonKVReceiver.disconnect_endpoint(f"tcp://127.0.0.1:{each.receiver.bootstrap_infos[0]['rank_port']}")


def forgets(manager: Any) -> bool:
    connections.forget_gone(manager)
    return "10.0.0.1:8998" not in manager.prefill_info_table


def test_a_server_that_prefills_is_met_anew_when_it_was_started_again(decodes: Any) -> None:
    first, other = decodes.met(), decodes.met("10.0.0.1:89989")
    connections.watch(None, first.receiver)  # with the next request
    first.end.send(b"of a request")
    assert first.socket.recv() == b"of a request"
    assert not forgets(decodes), "it is there"
    first.socket.close()
    assert eventually(lambda: forgets(decodes))
    assert (first.end.closed, other.end.closed) == (True, False)
    assert list(decodes.prefill_info_table) == ["10.0.0.1:89989"]
    assert list(decodes.connection_pool) == ["10.0.0.1:89989_0_0_0"]
    again = decodes.met()
    again.end.send(b"of the next")
    assert again.socket.recv() == b"of the next"
    time.sleep(0.3)
    assert not forgets(decodes), "what the old one left is not heard of the new one"


def test_a_server_that_was_gone_before_it_was_reached_is_met_anew(decodes: Any) -> None:
    decodes.met("10.0.0.2:8998").socket.close()
    assert eventually(lambda: connections.of(decodes).gone)
    connections.forget_gone(decodes)
    assert not decodes.prefill_info_table


def test_threads_end_with_their_connections(decodes: Any) -> None:
    made = [decodes.met(f"10.9.9.{at}:8998") for at in range(5)]
    threads = [each for each in threading.enumerate() if each.name.startswith("prefills 10.9.9.")]
    assert len(threads) == 5
    for each in made:
        each.end.close()  # as where SGLang's looks found nobody
    assert eventually(lambda: not any(each.is_alive() for each in threads))


class Queue:
    """The first queue of a scheduler of a pair: what came in, and whose refusal was told."""

    def __init__(self) -> None:
        self.kv_manager = SimpleNamespace(request_status={5: None, 7: None})  # servers that decode spoke of them
        self.metadata_buffers = buffers()
        self.transfer_backend = SimpleNamespace(value="mooncake")
        self.added: list[Any] = []
        self.told: list[Any] = []
        self.output_streamer = SimpleNamespace(stream_output=lambda reqs, _: self.told.extend(reqs))
        self.scheduler = self

    def admit(self, req: Any, *args: Any, **kwargs: Any) -> None:
        guards.admit(lambda _, req, *args, **kwargs: self.added.append(req), self, req, *args, **kwargs)


class Asked(SimpleNamespace):
    """A request; others may know of it as long as it is."""


def asks(room: Any = 5, host: Any = "10.0.0.1", port: Any = 8998, top: int = 0) -> Any:
    return Asked(
        rid="r", bootstrap_room=room, bootstrap_host=host, bootstrap_port=port, return_logprob=bool(top),
        finished_reason=None, logprob=SimpleNamespace(top_logprobs_num=top), input_token_logprobs_val=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"room": 7}, "another request is in this room"),
        ({"room": 0}, "from 1 to"),
        ({"room": -3}, "from 1 to"),
        ({"room": 2**63}, "from 1 to"),
        ({"room": True}, "from 1 to"),
        ({"host": None}, "bootstrap_host is the address"),
        ({"host": ""}, "bootstrap_host is the address"),
        ({"host": "a b"}, "bootstrap_host is the address"),
        ({"host": "a\nb"}, "bootstrap_host is the address"),
        ({"host": "a" * 256}, "bootstrap_host is the address"),
        ({"port": 0}, "from 1 to 65535: 0"),
        ({"port": 65536}, "from 1 to 65535: 65536"),
        pytest.param({"top": 129}, "at most 128 top log-probabilities of a token: 129", marks=MANY),
    ],
)
def test_a_request_that_would_end_a_scheduler_is_refused(given: dict[str, Any], said: str) -> None:
    queue, first, req = Queue(), asks(7), asks(**given)
    queue.admit(first, 4)
    queue.admit(req, 4)
    assert (queue.added, queue.told) == ([first], [req])
    assert said in req.finished_reason.message
    assert req.finished_reason.status_code == 400


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, {}),
        pytest.param({"room": 2**63 - 1, "host": "[::1]", "port": None, "top": 128}, {}, marks=MANY),
        ({"room": 0, "host": "2.2.2.2", "port": None}, {}),  # SGLang's own checks of health
        ({"room": 7}, {"is_retracted": True}),
        ({"room": 7}, {"is_rebootstrap": True}),
    ],
)
def test_any_other_request_comes_in(given: dict[str, Any], more: dict[str, Any]) -> None:
    queue, first, req = Queue(), asks(7), asks(**given)
    queue.admit(first)
    queue.admit(req, **more)
    assert (queue.added, queue.told) == ([first, req], [])


def test_a_room_is_free_when_its_request_is_gone() -> None:
    """However it ended: SGLang clears no room of a request that was aborted while it was computed."""
    queue, cleared = Queue(), []
    queue.kv_manager.failure_records = {7: "Aborted by AbortReq.", 8: "another"}
    queue.kv_manager._staging_outstanding = {7: 0, 8: 0}
    req = asks(7)
    req.disagg_kv_sender = SimpleNamespace(clear=lambda: cleared.append(7))
    queue.admit(req)
    assert cleared == []
    queue.added.clear()
    del req
    assert (cleared, queue.kv_manager.failure_records) == ([7], {8: "another"})
    assert queue.kv_manager._staging_outstanding == {8: 0}
    queue.admit(asks(7))
    assert (len(queue.added), queue.told) == (1, [])


def test_rooms_whose_requests_never_come_are_forgotten() -> None:
    """A server that decodes spoke of five rooms; the request of one comes at last."""
    queue, late = Queue(), asks(3)
    tables = [dict.fromkeys(range(1, 6)) for _ in range(3)]
    names = ("request_status", "transfer_infos", "req_to_decode_prefix_len")
    queue.kv_manager = SimpleNamespace(bootstrap_timeout=1000, **dict(zip(names, tables, strict=True)))
    for times in range(3):
        queue.admit(asks(9 + times))
        if times == 1:
            queue.admit(late)
        assert all(set(table) == {1, 2, 3, 4, 5} for table in tables)
    queue.kv_manager.bootstrap_timeout = 0
    queue.admit(asks(20))
    assert all(set(table) == {3} for table in tables)


def test_a_server_that_does_not_say_what_it_is_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "QUICK_S", 0.01)
    silent, asked = threading.Event(), []
    manager: Any = SimpleNamespace(prefill_info_table={})

    def ask(_: Any, address: str) -> bool:
        asked.append(address)
        assert silent.wait(60)
        manager.prefill_info_table[address] = "known"
        return True

    assert not guards.meet(ask, manager, "a:1")
    assert not guards.meet(ask, manager, "a:1")
    assert asked == ["a:1"], "once, however often the scheduler comes by"
    silent.set()
    while not guards.meet(ask, manager, "a:1"):
        pass
    assert guards.meet(ask, manager, "a:1")
    assert asked == ["a:1"]


def test_a_server_that_does_not_fit_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = SimpleNamespace(prefill_info_table={})

    def ask(*_: Any) -> bool:
        raise RuntimeError("Page size mismatch")

    for _ in range(2):
        assert not guards.meet(ask, manager, "a:1")
    assert "a:1 does not fit, its requests fail: Page size mismatch" in caplog.text
    assert guards.meet(lambda *_: True, manager, "a:1"), "it was started again"


def test_a_write_that_cannot_be_done_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    def write(*_: Any) -> int:
        raise RuntimeError("slot size mismatch")

    assert guards.survive(write, 1) == -1
    assert "slot size mismatch" in caplog.text
    assert guards.survive(lambda at: at, 0) == 0


def test_numbers_of_pages_are_sent_from_where_they_are_on_a_cpu() -> None:
    sender = type("Sender", (), {"supports_host_tensor_indices": True})
    one, other = sender(), sender()
    indices.at_hand(None, SimpleNamespace(disagg_kv_sender=one), last_chunk=True)
    assert (one.supports_host_tensor_indices, other.supports_host_tensor_indices) == (False, True)
