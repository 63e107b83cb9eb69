"""Allows the extra_buffer strategy on a CPU: our kernels return the checkpoints that it needs.

Newer versions of SGLang ask the platform in a function of its own, which is replaced by a yes. Older ones ask inside
the validator, which has to be replaced as a whole: its other checks are made here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.errors import ConfigError

logger = logging.getLogger(__name__)


def platform_supports_extra_buffer() -> bool:
    """REPLACE hook of mamba_hook._platform_supports_mamba_cache_extra_buffer."""
    return True


def validate(view: Any, hf_config: Any, *, mamba_cache_chunk_size_of: Callable[[], int]) -> None:
    """REPLACE hook of mamba_hook.validate_mamba_extra_buffer; raises ConfigError where SGLang asserts."""
    from sglang.srt.arg_groups.overrides import supports_mamba_cache_extra_buffer

    check(
        view, hf_config.architectures[0], supports_mamba_cache_extra_buffer(view, hf_config), mamba_cache_chunk_size_of
    )


def validate_method(server_args: Any, view: Any, model_arch: str) -> None:
    """REPLACE hook of ServerArgs._validate_mamba_extra_buffer, as SGLang 0.5.17 has it."""
    from sglang.srt.arg_groups.overrides import supports_mamba_cache_extra_buffer

    supported = supports_mamba_cache_extra_buffer(view, model_arch)
    check(view, model_arch, supported, lambda: server_args.mamba_cache_chunk_size)


def check(view: Any, architecture: str, supported: bool, chunk_size_of: Callable[[], int]) -> None:
    """Raise ConfigError if the resolved settings `view` cannot work with extra_buffer, warn if they make it useless.

    chunk_size_of gives the checkpoint granularity in tokens, and asserts that chunk and page size fit together.
    """
    if not supported:
        raise ConfigError(
            "SGLang cannot checkpoint this model with extra_buffer; use --mamba-radix-cache-strategy no_buffer: "
            f"{architecture}"
        )
    if view.mamba_radix_cache_strategy == "extra_buffer_lazy" and view.disaggregation_mode != "null":
        raise ConfigError(
            "extra_buffer_lazy does not work with disaggregated prefill; use --mamba-radix-cache-strategy "
            f"extra_buffer: --disaggregation-mode {view.disaggregation_mode}"
        )
    interval, page_size = view.mamba_track_interval, view.page_size
    if view.speculative_num_draft_tokens is not None and interval < view.speculative_num_draft_tokens:
        raise ConfigError(
            f"one draft must not span two checkpoints; set --mamba-track-interval to at least "
            f"{view.speculative_num_draft_tokens}: {interval}"
        )
    if page_size is None:
        return  # SGLang has not resolved it yet and calls again
    if interval % page_size:
        raise ConfigError(
            f"checkpoints must fall on page boundaries; set --mamba-track-interval to a multiple of {page_size}: "
            f"{interval}"
        )
    try:
        chunk_size = chunk_size_of()
    except AssertionError as error:
        raise ConfigError(
            f"one of the model's chunk size and --page-size must divide the other; change --page-size: {page_size}"
        ) from error
    if view.chunked_prefill_size is not None and 0 < view.chunked_prefill_size < chunk_size:
        logger.warning(
            "--chunked-prefill-size %s is smaller than the checkpoint granularity of %s tokens: long prompts leave no "
            "checkpoints; raise it to at least %s",
            view.chunked_prefill_size,
            chunk_size,
            chunk_size,
        )
