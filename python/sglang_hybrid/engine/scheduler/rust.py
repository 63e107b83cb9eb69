"""SGLang's server in Rust (`SGLANG_RUST_SERVER=1`): threads of the scheduler that stand in place of the HTTP process.

What our HTTP process does for a request is not done there. The scheduler checks what would end it, and what stands in
answers stays SGLang's (docs/clients.md).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from sglang_hybrid.engine.frontend.validation.arrival import require_arrival
from sglang_hybrid.engine.frontend.validation.prompt import require_prompt
from sglang_hybrid.engine.frontend.validation.sampling import INTERNAL

_SAME = (
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "token_indices_to_pool",
    "priority", "extra_key",
)  # fmt: skip
"""Fields of a request that are checked as they are."""

_NORMALIZED = {"stop": "stop_strs", "stop_regex": "stop_regex_strs"}
"""Where SGLang keeps what a client gave."""


def plain_ids(_: Any, payload: Any, *__: Any) -> None:
    """Before tokens go to Rust: ids are encoded as they are, and ours are more than texts (`scheduler.ids`)."""
    payload.rids = [str(rid) for rid in payload.rids]


def plain_id(_: Any, abort: Any, *__: Any) -> None:
    """The same before the end of a request that waited goes to Rust."""
    abort.rid = str(abort.rid)


def meet(_: None, scheduler: Any) -> None:
    """After a scheduler started its server: `require` asks that for the model and the settings."""
    if scheduler.rust_server is not None:
        scheduler.rust_server.sglang_hybrid_model = scheduler.model_config
        scheduler.rust_server.sglang_hybrid_args = scheduler.server_args


def require(_: None, server: Any, obj: Any, *__: Any) -> None:
    """After a request came from Rust; raises ConfigError, which Rust answers with 400 for that request alone."""
    if getattr(obj, "sampling_params", None) is None or obj.input_ids is None:
        return  # of the server's own, such as an abort
    model = server.sglang_hybrid_model
    asked = _as_it_came(obj)
    require_arrival(asked, int(model.vocab_size), most_sequences=1, from_client=False)
    manager = SimpleNamespace(model_config=model, context_len=model.context_len, server_args=server.sglang_hybrid_args)
    require_prompt(manager, asked, obj.input_ids)


def _as_it_came(obj: Any) -> Any:
    """The request in the form in which HTTP has it, for those that check it there."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    params = obj.sampling_params
    given = {
        field.name: value
        for field in msgspec.structs.fields(params)
        if field.name not in INTERNAL and (value := getattr(params, field.name)) != field.default
    }
    for name, kept in _NORMALIZED.items():
        if value := getattr(params, kept):
            given[name] = value
    same = {name: getattr(obj, name) for name in _SAME}
    return GenerateReqInput(rid=obj.rid, input_ids=obj.input_ids, sampling_params=given, **same)
