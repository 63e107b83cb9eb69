"""What an administrator asks for that cannot be is answered; SGLang's scheduler would end on it. Runs there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.engine.speculation.weights import draft_spared

logger = logging.getLogger(__name__)


def open_session(original: Callable[..., Any], controller: Any, message: Any) -> Any:
    """AROUND hook of SessionController.open: streaming sessions leave a row of KV free. One keeps its row while it is
    idle, and with all rows kept nobody is admitted any more, turns of these sessions neither."""
    from sglang.srt.managers.io_struct import OpenSessionReqOutput

    rows, streaming = controller.tree_cache.req_to_token_pool.size, bool(message.streaming)
    if streaming and sum(session.streaming for session in controller.sessions.values()) >= rows - 1:
        logger.warning(
            "a streaming session is not opened: each keeps one of %d rows until it is closed, and one stays free; "
            "close some, open them with a timeout, or start with more --max-running-requests",
            rows,
        )
        return OpenSessionReqOutput(session_id=message.session_id, success=False)
    return original(controller, message)


def send_weights(original: Callable[..., Any], worker: Any, message: Any) -> Any:
    """AROUND hook of send_weights_to_remote_instance: success and message, a group that nobody made included."""
    try:
        return original(worker, message)
    except AssertionError as error:
        return False, f"cannot send weights: {shown(error)}"
    except KeyError as error:
        return (
            False,
            f"call /init_weights_send_group_for_remote_instance first; there is no group {shown(error.args[0])}",
        )


def update_weights(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    """AROUND hook of update_weights_from_tensor: tensors that cannot be read or do not fit are told of, on every rank.

    Ranks that load what another could not would compute with other weights than it.
    """
    import torch.distributed
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    ranks = torch.distributed.get_world_size(group=updater.tp_cpu_group)
    payloads = len(message.serialized_named_tensors)
    if payloads < ranks:
        return UpdateWeightsFromTensorReqOutput(
            success=False, message=f"serialized_named_tensors has one entry for each of {ranks} ranks: {payloads}"
        )
    try:
        with draft_spared(updater, message):
            answer = original(updater, message)
    except Exception as error:
        if _is_stale(error):
            raise
        logger.exception("weights that were sent cannot be loaded")
        torch.distributed.barrier(group=updater.tp_cpu_group)  # where the others wait
        answer = UpdateWeightsFromTensorReqOutput(
            success=False,
            message=f"cannot load these tensors: {shown(error)}; the weights may be changed in part: load all of them",
        )
    if ranks > 1:
        answers = [(True, "")] * ranks
        torch.distributed.all_gather_object(answers, (answer.success, answer.message), group=updater.tp_cpu_group)
        bad = [f"rank {rank}: {said}" for rank, (success, said) in enumerate(answers) if not success]
        if 0 < len(bad) < ranks:
            if not answer.success:
                updater.flush_cache_after_weight_update(message)  # as the others did: ranks have one cache
            answer = UpdateWeightsFromTensorReqOutput(success=False, message=bad[0])
    return answer


def load_from_disk(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    """AROUND hook of update_weights_from_disk: after a folder that does not fit, the weights are those of before.

    SGLang rolls back to the folder that it just failed to load, and ends.
    """
    with draft_spared(updater, message):
        return _load_or_roll_back(original, updater, message)


def _load_or_roll_back(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    model = updater.tp_worker.model_runner.model_config
    asked, before = message.model_path, model.model_path
    try:
        answer = original(updater, message)
    except Exception as error:
        if _is_stale(error):
            raise
        logger.exception("%s cannot be loaded, back to %s", shown(asked), before)
        message.model_path, message.load_format, message.weight_version = before, "auto", None
        original(updater, message)
        return UpdateWeightFromDiskReqOutput(
            success=False,
            message=f"cannot load {shown(asked)}: {shown(error)}; the weights are those of {before} again",
        )
    if not answer.success:
        model.model_path = before
    return answer


def _is_stale(error: Exception) -> bool:
    """Whether the weights have changed and the cache has not: such a server must not go on."""
    return isinstance(error, AssertionError) and "flush" in str(error)


def join_group(original: Callable[..., Any], worker: Any, message: Any) -> Any:
    """AROUND hook of init_weights_update_group and its kin: SGLang asserts what it could refuse."""
    try:
        return original(worker, message)
    except (AssertionError, ValueError) as error:
        return False, f"cannot join this group: {shown(error)}"
