"""Data parallelism: what SGLang's controller is told of where a request goes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.engine.scheduler import dispatch


class Controller:
    """SGLang's, as far as the hook knows it."""

    def __init__(self, **arguments: Any) -> None:
        self.server_args = SimpleNamespace(**{"disable_radix_cache": False, "disaggregation_mode": "null", **arguments})
        self.status, self._active_workers = [True] * 4, [0, 1, 2, 3]
        self.load_snapshot_reader = SimpleNamespace(read_all=lambda: [self.load(rank) for rank in range(4)])
        self.handed: list[int | None] = []

    def load(self, rank: int) -> Any:
        names = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "max_total_num_tokens")
        return SimpleNamespace(timestamp=0.0, dp_rank=rank, max_running_requests=8, **dict.fromkeys(names, 0))

    def ask(self, tokens: Any, **fields: Any) -> int | None:
        dispatch.by_prefix(
            lambda _, req: self.handed.append(req.routed_dp_rank),
            self,
            SimpleNamespace(**{"routed_dp_rank": None, "input_ids": tokens, **fields}),
        )
        return self.handed[-1]


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(**fields: Any) -> None:
        monkeypatch.setattr(dispatch, "settings", lambda: HybridConfig(**fields))

    use()
    return use


PROMPT = array("q", range(3000))


def test_the_next_turn_goes_where_the_last_one_went() -> None:
    controller = Controller()
    first = [controller.ask(PROMPT), controller.ask(PROMPT, lora_id="a"), controller.ask(PROMPT, extra_key="b")]
    assert sorted(first) == [0, 1, 2]
    turn = PROMPT + array("q", range(100))
    assert [controller.ask(turn), controller.ask(turn, lora_id="a"), controller.ask(turn, extra_key="b")] == first


def test_ids_that_stand_for_images_are_taken_as_they_are() -> None:
    """They may have 64 bits, and be negative."""
    image = array("q", [-(1 << 60)] * 1500 + [(1 << 62) + 5] * 1500)
    controller = Controller()
    assert [controller.ask(image), controller.ask(PROMPT), controller.ask(image)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("name", "fields", "forgotten"),
    [
        ("FlushCacheReqInput", {}, True),
        ("UpdateWeightFromDiskReqInput", {"model_path": "m"}, True),
        ("UpdateWeightsFromIPCReqInput", {"zmq_handles": {}}, True),
        ("ReleaseMemoryOccupationReqInput", {}, True),
        ("UpdateWeightFromDiskReqInput", {"model_path": "m", "flush_cache": False}, False),
        ("GetInternalStateReq", {}, False),
    ],
)
def test_caches_that_are_emptied_hold_nothing(name: str, fields: dict[str, Any], forgotten: bool) -> None:
    """A prompt that is to be computed anew is not sent behind others as if it cost nothing."""
    from sglang.srt.managers import io_struct

    controller = Controller()
    dispatch.forget(controller, getattr(io_struct, name)(**fields))  # there is nothing to forget yet
    sent = [PROMPT, *(array("q", range(at, at + 2000)) for at in (5000, 7000, 9000))]
    assert [controller.ask(each) for each in sent] == [0, 1, 2, 3]
    dispatch.forget(controller, getattr(io_struct, name)(**fields))
    assert (controller.ask(PROMPT) != 0) == forgotten


def test_who_is_named_is_asked() -> None:
    controller = Controller()
    assert controller.ask(PROMPT, routed_dp_rank=3) == 3


def test_one_that_does_not_serve_gets_nothing() -> None:
    controller = Controller()
    controller._active_workers, controller.status[2] = [1, 2, 3], False
    assert {controller.ask(array("q", range(at, at + 200))) for at in range(0, 4000, 200)} == {1, 3}


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"dp_routing": "round_robin"}, {}),
        ({"backend": "stock"}, {}),
        ({}, {"disable_radix_cache": True}),
        ({}, {"disaggregation_mode": "decode"}),
    ],
)
def test_otherwise_it_is_left_to_sglang(config: Any, fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    config(**fields)
    assert Controller(**arguments).ask(PROMPT) is None


@pytest.mark.parametrize("tokens", [None, array("q"), array("q", range(64))])
def test_so_are_requests_without_a_page_of_tokens(tokens: Any) -> None:
    assert Controller().ask(tokens) is None
