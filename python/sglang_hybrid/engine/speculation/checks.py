"""What of speculative decoding is refused for hybrid models before a model loads: it would give wrong answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.launch.models import read_config

_BLOCKS = {"DFLASH": 0, "DSPARK": 1}
"""Algorithms that draft a block at once, and how many tokens more than it a verification has."""

_DRAFT_TOKENS = {"NGRAM": 12, "DFLASH": 16, "DSPARK": 8}
"""What SGLang takes where nothing is said: a verification has this many tokens at most (0.5.17 to 0.5.23)."""

_ADAPTIVE_DRAFT_TOKENS = 8
"""The most of SGLang's own table of `--speculative-adaptive`: seven steps and the last token (0.5.17 to 0.5.23)."""

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
    _check_replay(namespace, algorithm, spec)
    _check_sessions(namespace)
    _check_interval(namespace)


def _check_breadth(namespace: Any, algorithm: str) -> None:
    """Drafts of n-grams are no chains even with breadth 1, but recurrent layers take them for chains then."""
    if algorithm == "NGRAM" and namespace.speculative_ngram_max_bfs_breadth < 2:
        raise ConfigError(
            "SGLang's recurrent layers take drafts of breadth 1 for chains, which they are not, and answers go wrong; "
            f"use at least 2: --speculative-ngram-max-bfs-breadth {namespace.speculative_ngram_max_bfs_breadth}"
        )


def _check_replay(namespace: Any, algorithm: str, spec: ModelSpec) -> None:
    """A replayed verification knows chains only, and keeps the live state behind its length."""
    if not getattr(namespace, "enable_linear_replayssm_spec", False):
        return
    if algorithm == "NGRAM":
        raise ConfigError(
            "drafts of n-grams are trees, and SGLang replays chains only; drop --enable-linear-replayssm-spec: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    if algorithm in _BLOCKS and "kda" not in spec.layer_counts:
        raise ConfigError(
            f"{algorithm} commits the replayed states of Kimi delta attention only, and SGLang ends at the first "
            "verification of this model; drop --enable-linear-replayssm-spec: "
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
    if algorithm in _BLOCKS:
        block = _block(namespace, algorithm)
        given = given or (block and block + _BLOCKS[algorithm])
    steps = namespace.speculative_num_steps
    chain = namespace.speculative_eagle_topk in (None, 1)
    if algorithm not in _DRAFT_TOKENS and steps is not None and chain:
        given = max(given or 0, steps + 1)  # of a chain, whatever was asked for
    if algorithm in ("EAGLE", "EAGLE3", "NEXTN") and namespace.speculative_adaptive and chain:
        given = _adaptive(namespace)
    return int(given or _DRAFT_TOKENS.get(algorithm, _OTHER_DRAFT_TOKENS))


def _block(namespace: Any, algorithm: str) -> int | None:
    """The block of a draft by its flag, else by its configuration; None where neither says it."""
    given = getattr(namespace, f"speculative_{algorithm.lower()}_block_size", None)
    folder = Path(namespace.speculative_draft_model_path or namespace.model_path).expanduser()
    if given is None and folder.is_dir():
        config = read_config(folder)
        nested = config.get("dflash_config") or {}
        given = nested.get("block_size", config.get("block_size"))
        if algorithm == "DSPARK":
            given = config.get("dspark_block_size", given)
    return None if given is None else int(given)


def _adaptive(namespace: Any) -> int:
    """The most tokens of all steps that an adaptive server changes between."""
    path = namespace.speculative_adaptive_config
    if path is None:
        return _ADAPTIVE_DRAFT_TOKENS
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        return 1 + max(step for key, row in table.items() if key.isdigit() for step in row["candidate_steps"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the table of steps is not readable JSON with candidate_steps per batch size ({error}): "
            f"--speculative-adaptive-config {path}"
        ) from error
