"""Every request of the HTTP process: checked before SGLang sees it, and gone without a trace when it is over."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from sglang_hybrid.engine.cache import boundaries
from sglang_hybrid.engine.frontend.marks import placeholders
from sglang_hybrid.engine.frontend.reporting import labels
from sglang_hybrid.engine.frontend.segments import parallel
from sglang_hybrid.engine.frontend.segments.prompts import divide, separator
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.frontend.tokenization import texts, token_cache
from sglang_hybrid.engine.frontend.validation import media
from sglang_hybrid.engine.frontend.validation.arrival import require_arrival, session_of
from sglang_hybrid.engine.frontend.validation.ids import require_own
from sglang_hybrid.engine.frontend.validation.processors import require_readable
from sglang_hybrid.engine.frontend.validation.prompt import require_embeds, require_prompt
from sglang_hybrid.engine.processes import embedded

logger = logging.getLogger(__name__)


async def generate(
    original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[dict[str, Any]]:
    """SGLang's answers to `obj`; `request` is the HTTP request it came with, None for one of the server's own."""
    if hasattr(obj.input_ids, "keys"):  # of Ollama's chats up to 0.5.22: transformers' answer, ids among it
        obj.input_ids = list(obj.input_ids["input_ids"])
    obj.is_single = not isinstance(obj.rid, list)  # asked for when the response is over, whatever becomes of it
    path = None if request is None else str(request.scope.get("path", ""))
    if path is not None:
        require_own(obj, path)
    require_arrival(obj, int(manager.model_config.vocab_size), settings().max_sequences, request is not None)
    keep_session(manager.server_args, obj)
    labels.keep_allowed(obj, manager.server_args.tokenizer_metrics_allowed_custom_labels)
    require_embeds(obj.input_embeds, manager.model_config)
    if getattr(obj, "custom_logit_processor", None) and manager.server_args.enable_custom_logit_processor:
        await asyncio.to_thread(require_readable, obj.custom_logit_processor)
    if request is not None and media.given(obj):
        trusts = bool(getattr(manager.server_args, "trust_mm_content_hashes", False))
        await asyncio.to_thread(media.require_sources, obj, int(manager.model_config.vocab_size), trusts)
    token_cache.enter_of(obj)
    await texts.beside_if(bool(separator()) and texts.are_long(obj.text), partial(divide, obj, manager.tokenizer, path))
    parallel.outer.set(None if request is None else obj)
    asked, engine = original(manager, obj, request), embedded.of(manager)
    try:
        async with aclosing(asked if engine is None else engine.answers(asked)) as answers:
            async for answer in answers:
                yield answer
    finally:
        release(manager, obj)


def keep_session(server_args: Any, obj: Any) -> None:
    """All turns of a session go to one replica, unless the client names one: each keeps the history of what it got.

    SGLang opens a session in all of them and hands turns round. One that came elsewhere would be answered without the
    turns between, or as of a session that is not there.
    """
    replicas = (server_args.dp_size or 1) * (getattr(server_args, "attn_dp_size", None) or 1)
    session = session_of(obj)
    named = (getattr(obj, name, None) for name in ("routed_dp_rank", "data_parallel_rank"))
    if replicas > 1 and session is not None and all(rank is None for rank in named):
        obj.routed_dp_rank = zlib.crc32(str(session).encode()) % replicas


def release(manager: Any, obj: Any) -> None:
    """Drop the states of `obj` that never reached the scheduler, for nobody else will.

    SGLang makes a state for each of n samples, then others that it sends; of the unsent ones it drops one per prompt,
    the rest only where the caller gives up early. A batch that repeats the id of a running request leaves those before
    it. SIGTERM waits until no state is left.
    """
    if getattr(obj, "is_single", True) or not isinstance(obj.rid, list):
        return
    made = {id(sub) for sub in getattr(obj, "_sub_obj_cache", {}).values()}
    for rid in obj.rid:
        state = manager.rid_to_state.get(rid)
        if state is not None and not state.dispatched and id(state.obj) in made:
            del manager.rid_to_state[rid]


def validate(manager: Any, obj: Any, input_ids: Any) -> None:
    """Check one prompt of a request once it is tokens; marks between its images get their places."""
    if input_ids is not None:
        truncate(manager, obj, input_ids)
        placeholders.place(obj, input_ids)
    require_prompt(manager, obj, input_ids)


def truncate(manager: Any, obj: Any, ids: list[int]) -> None:
    """With `--allow-auto-truncate`, leave of a text's tokens what can be admitted.

    SGLang leaves so many that no room for an answer is left, which then is token 0, uncomputed, or none is admitted.
    """
    most = manager.max_req_input_len
    if manager.allow_auto_truncate and most is not None and len(ids) >= most and not obj.contains_mm_input():
        logger.warning("request %s: a prompt of %d tokens is cut to %d", obj.rid, len(ids), most - 1)
        del ids[most - 1 :]
        params = obj.sampling_params or {}
        if isinstance(custom := params.get("custom_params"), dict):
            obj.sampling_params = {**params, "custom_params": boundaries.cut(custom, len(ids))}
