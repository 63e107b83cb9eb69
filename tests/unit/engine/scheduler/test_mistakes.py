"""What cannot be is answered: nobody to send weights to, weights that do not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine.scheduler import beams, mistakes


def test_weights_for_a_group_that_nobody_made_are_not_sent() -> None:
    def original(worker: dict[str, Any], message: str) -> tuple[bool, str]:
        return worker[message]

    there = {"group": (True, "sent")}
    assert mistakes.send_weights(original, there, "group") == (True, "sent")
    done, said = mistakes.send_weights(original, there, "another")
    assert not done
    assert "/init_weights_send_group_for_remote_instance" in said
    assert "another" in said


@pytest.mark.parametrize("pool", ["mamba_pool", "of attention alone"])
def test_beams_of_a_model_with_states_are_refused(pool: str) -> None:
    """With a prefix cache or without one: SGLang looks for states in the cache."""
    coordinator = SimpleNamespace(req_to_token_pool=SimpleNamespace(**{pool: None}))
    told = beams.refuse(lambda *_: None, coordinator, "a request", "its message")
    assert (told is not None and "beam_width" in told) == (pool == "mamba_pool")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The updater of a server's only rank."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    model = SimpleNamespace(model_path="served")
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=model))
    return SimpleNamespace(tp_cpu_group=None, tp_worker=worker, draft_worker=None, model=model)


def failing(error: Exception) -> Callable[..., Any]:
    def original(*_: Any) -> Any:
        raise error

    return original


def test_tensors_that_cannot_be_loaded_are_told_of(alone: Any) -> None:
    from sglang.srt.managers import io_struct

    tensors = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b"one"])
    good = io_struct.UpdateWeightsFromTensorReqOutput(success=True, message="done")
    assert mistakes.update_weights(lambda *_: good, alone, tensors) is good
    answer = mistakes.update_weights(failing(KeyError("a.weight")), alone, tensors)
    assert not answer.success
    assert "a.weight" in answer.message
    nothing = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[])
    assert "one entry for each of 1 ranks: 0" in mistakes.update_weights(failing(KeyError()), alone, nothing).message


@pytest.mark.parametrize("call", [mistakes.update_weights, mistakes.load_from_disk])
def test_a_server_whose_weights_changed_without_its_cache_ends(alone: Any, call: Callable[..., Any]) -> None:
    message = SimpleNamespace(serialized_named_tensors=[b""], model_path="other")
    with pytest.raises(AssertionError, match="Cache flush failed"):
        call(failing(AssertionError("Cache flush failed after updating weights")), alone, message)


def test_a_folder_that_does_not_fit_is_rolled_back(alone: Any) -> None:
    """SGLang notes the folder before it loads it, and rolls back to what it noted."""
    from sglang.srt.managers import io_struct

    asked: list[tuple[str, str | None]] = []

    def original(_: Any, message: Any) -> Any:
        alone.model.model_path = message.model_path
        asked.append((message.model_path, message.weight_version))
        if message.model_path == "other":
            raise AssertionError("param_data.shape == loaded_weight.shape")
        return io_struct.UpdateWeightFromDiskReqOutput(success=message.model_path == "served", message="")

    update = io_struct.UpdateWeightFromDiskReqInput
    answer = mistakes.load_from_disk(original, alone, update(model_path="other", weight_version="2"))
    assert not answer.success
    assert "the weights are those of served again" in answer.message
    assert asked == [("other", "2"), ("served", None)]
    assert not mistakes.load_from_disk(original, alone, update(model_path="nowhere")).success
    assert alone.model.model_path == "served"


@pytest.mark.parametrize("call", [mistakes.join_group, mistakes.send_weights])
def test_a_group_that_sglang_asserts_against_is_refused(call: Callable[..., Any]) -> None:
    done, said = call(failing(AssertionError("Expected 1 ports, but got 2 ports.")), None, None)
    assert not done
    assert "Expected 1 ports" in said


def load(rank: int, file: str, bad: int, outcomes: Any) -> None:
    from sglang.srt.managers import io_struct

    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    flushed: list[Any] = []
    group = torch.distributed.group.WORLD
    served = SimpleNamespace(model_runner=SimpleNamespace(model_config=SimpleNamespace(model_path="served")))
    updater = SimpleNamespace(
        tp_cpu_group=group, tp_worker=served, draft_worker=None, flush_cache_after_weight_update=flushed.append
    )

    def original(*_: Any) -> Any:
        if rank == bad:
            raise ValueError("damaged")
        updater.flush_cache_after_weight_update(message)
        torch.distributed.barrier()
        return io_struct.UpdateWeightsFromTensorReqOutput(success=True, message="done")

    message = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b"", b""])
    answer = mistakes.update_weights(original, updater, message)
    outcomes.put((rank, answer.success, answer.message, len(flushed)))
    os._exit(0)  # as a rank ends; threads of SGLang's imports now and then abort an interpreter that shuts down


@pytest.mark.parametrize("bad", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_agree_whether_tensors_were_loaded(tmp_path: Path, bad: int) -> None:
    context = torch.multiprocessing.get_context("spawn")
    outcomes = context.SimpleQueue()
    torch.multiprocessing.start_processes(
        load, (str(tmp_path / "group"), bad, outcomes), nprocs=2, start_method="spawn"
    )
    answers = sorted(outcomes.get() for _ in range(2))
    assert [success for _, success, *_ in answers] == [False, False]
    assert all("damaged" in said for _, _, said, _ in answers)
    assert [flushes for *_, flushes in answers] == [1, 1], "a rank that found less in its cache than another would hang"


@pytest.mark.parametrize(("streams", "there", "opens"), [(True, 2, True), (True, 3, False), (False, 9, True)])
def test_streaming_sessions_leave_a_row(streams: bool, there: int, opens: bool) -> None:
    others = {str(number): SimpleNamespace(streaming=True) for number in range(there)}
    sessions = {**others, "plain": SimpleNamespace(streaming=False)}
    cache = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=4))
    controller = SimpleNamespace(sessions=sessions, tree_cache=cache)
    message = SimpleNamespace(session_id="new", streaming=streams)
    answer = mistakes.open_session(lambda *_: SimpleNamespace(success=True), controller, message)
    assert answer.success is opens
