"""What of speculative decoding is refused for hybrid models before a model loads: it would give wrong answers."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec

_DRAFT_TOKENS = {"NGRAM": 12, "DFLASH": 16}
"""What SGLang takes where nothing is said: a verification has this many tokens at most (0.5.17 to 0.5.23)."""

_OTHER_DRAFT_TOKENS = 4
"""Three steps in a chain and the last token, for the draft models of every hybrid architecture."""


def check(namespace: Any, spec: ModelSpec | None) -> None:
    """Raise ConfigError for settings of SGLang in `namespace` under which a hybrid model would answer wrongly.

    `spec` is None where the model is not known yet; models without recurrent layers have none of these faults.
    """
    if namespace.speculative_algorithm is None or spec is None or not spec.is_recurrent:
        return
    algorithm = namespace.speculative_algorithm.upper()
    _check_breadth(namespace, algorithm)
    _check_replay(namespace, algorithm)
    _check_sessions(namespace)
    _check_interval(namespace)


def _check_breadth(namespace: Any, algorithm: str) -> None:
    """Drafts of n-grams are no chains even with breadth 1, but recurrent layers take them for chains then."""
    if algorithm == "NGRAM" and namespace.speculative_ngram_max_bfs_breadth < 2:
        raise ConfigError(
            "SGLang's recurrent layers take drafts of breadth 1 for chains, which they are not, and answers go wrong; "
            f"use at least 2: --speculative-ngram-max-bfs-breadth {namespace.speculative_ngram_max_bfs_breadth}"
        )


def _check_replay(namespace: Any, algorithm: str) -> None:
    """A replayed verification knows chains only, and keeps the live state behind its length."""
    if not getattr(namespace, "enable_linear_replayssm_spec", False):
        return
    if algorithm == "NGRAM":
        raise ConfigError(
            "drafts of n-grams are trees, and SGLang replays chains only; drop --enable-linear-replayssm-spec: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    strategy = _strategy(namespace)
    if strategy == "no_buffer" and not namespace.disable_radix_cache:
        raise ConfigError(
            "with --enable-linear-replayssm-spec the state lags behind its tokens, and SGLang caches it all the same: "
            f"answers go wrong; use --mamba-radix-cache-strategy extra_buffer: {namespace.mamba_radix_cache_strategy}"
        )


def _check_sessions(namespace: Any) -> None:
    """A streaming session cuts its KV at the stop and keeps its state, which cannot be cut."""
    if getattr(namespace, "enable_streaming_session", False):
        raise ConfigError(
            "a verification runs past the end of an answer, and the next turn of a streaming session would go on from "
            "there; drop --enable-streaming-session or the speculation: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )


def _check_interval(namespace: Any) -> None:
    """Two steps in a row write to one slot where the scheduler prepares a step before it knows the last one."""
    overlaps = not namespace.disable_overlap_schedule and namespace.pp_size == 1
    tracked = _strategy(namespace) != "no_buffer" and not namespace.disable_radix_cache
    drafts, interval = draft_tokens(namespace), namespace.mamba_track_interval
    if overlaps and tracked and interval < 2 * drafts:
        raise ConfigError(
            f"two drafts of {drafts} tokens in a row must not reach two checkpoints; use at least {2 * drafts}, or add "
            f"--disable-overlap-schedule: --mamba-track-interval {interval}"
        )


def _strategy(namespace: Any) -> str:
    """Where a state is saved; SGLang chooses by the overlap schedule and the page size."""
    if namespace.mamba_radix_cache_strategy != "auto":
        return str(namespace.mamba_radix_cache_strategy)
    paged = namespace.page_size is not None and namespace.page_size > 1
    return "no_buffer" if namespace.disable_overlap_schedule and not paged else "extra_buffer"


def candidate_bytes(tokens: int, requests: int, state_bytes: int) -> int:
    """States behind each of the `tokens` of a verification; SGLang keeps them for all `requests` and one of padding."""
    return tokens * (requests + 1) * state_bytes


def draft_tokens(namespace: Any) -> int:
    """Tokens of a verification at most, as SGLang will have them; 0 where nothing is verified."""
    if namespace.speculative_algorithm is None:
        return 0
    algorithm = namespace.speculative_algorithm.upper()
    given = namespace.speculative_num_draft_tokens
    if algorithm == "DFLASH":
        given = given or getattr(namespace, "speculative_dflash_block_size", None)
    steps = namespace.speculative_num_steps
    if algorithm not in _DRAFT_TOKENS and steps is not None and namespace.speculative_eagle_topk in (None, 1):
        given = max(given or 0, steps + 1)  # of a chain, whatever was asked for
    return int(given or _DRAFT_TOKENS.get(algorithm, _OTHER_DRAFT_TOKENS))
