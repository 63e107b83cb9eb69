"""A prompt as token ids, right before SGLang makes the object that goes to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.boundaries import named
from sglang_hybrid.engine.cache.hints import named_hints
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.frontend.validation.arrival import session_of
from sglang_hybrid.engine.frontend.validation.limits import LOGPROBS, TOKENS, require_ids, shown
from sglang_hybrid.engine.segments import marked

_WITHOUT_EMBEDS = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM")
"""They call the argument `inputs_embeds`, SGLang `input_embeds` (0.5.17 to 0.5.23)."""

_DEFAULT_NEW_TOKENS = 128
"""SGLang's `max_new_tokens` where a request has none."""


def require_prompt(manager: Any, obj: Any, ids: Sequence[int] | None) -> None:
    """Check the prompt of one sequence; raises ConfigError, which SGLang answers with 400 for that request alone.

    Embedding lookups do not check their index: a token outside the vocabulary ends the scheduler, on a GPU the device's
    context with it.
    """
    if ids is None:
        return
    vocabulary = int(manager.model_config.vocab_size)
    # What SGLang's processors of images and sounds make of a prompt is theirs; what the client gave is checked.
    made = obj.contains_mm_input() and manager.model_config.is_multimodal
    require_ids((obj.input_ids or ()) if made else ids, vocabulary)
    if not len(ids) and not session_of(obj):
        raise ConfigError("a prompt has at least one token: 0")
    for name in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        positions = getattr(obj, name, None)
        if positions and not 0 <= min(positions) <= max(positions) < len(ids):
            raise ConfigError(f"{name} are positions in the prompt, which has {len(ids)} tokens: {shown(positions)}")
    if positions := getattr(obj, "token_indices_to_pool", None):
        _require_whole_prompts(manager, positions)
    params = obj.sampling_params or {}
    samples = params.get("n", 1)
    if len(ids) * samples > TOKENS:
        raise ConfigError(
            f"a prompt times its samples has at most {TOKENS} tokens; send several requests: {len(ids)} x {samples}"
        )
    if getattr(obj, "return_logprob", False):
        _require_logprobs(obj, params, len(ids), manager.context_len, samples)
    named(params.get("custom_params"), len(ids))
    named_hints(params.get("custom_params"))
    _require_segments(obj, params.get("custom_params"), len(ids))


def require_embeds(given: Any, model_config: Any) -> None:
    """Check `input_embeds`, vectors of one prompt or of several: another width ends the scheduler.

    Raises ConfigError also for a model to which SGLang does not hand them: it would answer to token ids it made up.
    """
    if given is None:
        return
    name = (getattr(model_config.hf_config, "architectures", None) or [""])[0]
    if name in _WITHOUT_EMBEDS:
        raise ConfigError(f"SGLang computes this model from token ids only; send text or input_ids: {name}")
    width = int(model_config.hidden_size)
    for vector in (vector for prompt in given for vector in (prompt if isinstance(prompt[0], list) else [prompt])):
        if len(vector) != width:
            raise ConfigError(f"input_embeds are vectors as wide as the model, {width} numbers: {len(vector)}")


def _require_whole_prompts(manager: Any, positions: Sequence[int]) -> None:
    """SGLang counts `token_indices_to_pool` from the first token that a pass computes.

    Behind a cached prefix, or in a later chunk, the values are those of other tokens, or of none: the scheduler ends.
    """
    args = compat.resolved(manager.server_args)
    if not args.disable_radix_cache or args.chunked_prefill_size > 0:
        raise ConfigError(
            "token_indices_to_pool need prompts that are computed from their first token in one pass; leave them out, "
            f"or start the server with --disable-radix-cache --chunked-prefill-size -1: {shown(positions)}"
        )


def _require_segments(obj: Any, custom_params: Any, prompt_tokens: int) -> None:
    """Without segments in the server the key is no word of ours, and what stands under it somebody else's."""
    if settings().segments != "on" or not marked.named(custom_params, prompt_tokens):
        return
    if session_of(obj):
        raise ConfigError(
            f"a turn of a session marks no segments, for its history stands in front of them; leave "
            f"custom_params.{marked.KEY} out: {shown(custom_params[marked.KEY])}"
        )


def _require_logprobs(obj: Any, params: dict[str, Any], prompt: int, context: int, samples: int) -> None:
    room, new = max(context - prompt, 0), params.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
    start = obj.logprob_start_len
    before = max(prompt - start, 0) if start >= 0 else 0
    each = 1 + obj.top_logprobs_num + len(obj.token_ids_logprob or ())
    allowed = LOGPROBS // (each * samples) - before
    if new is None and 0 < allowed < room:
        params["max_new_tokens"] = new = allowed  # most answers end long before; one that does not is cut there
    positions = before + (room if new is None else min(new, room))
    if positions * each * samples > LOGPROBS:
        raise ConfigError(
            f"a request returns at most {LOGPROBS} log-probabilities; ask for fewer per token, fewer tokens "
            f"(max_tokens) or a smaller n: {positions} x {each} x {samples}"
        )
