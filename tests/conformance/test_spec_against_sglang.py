"""Byte costs equal the sizes SGLang's own code computes and allocates, for every family SGLang serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.families import FAMILIES, UNPRICED
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.served import ARCHITECTURES, Where
from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.engine import compat
from tests.conformance.tiny import TINY
from tests.versions import since

SCRIPT = Path(__file__).with_name("sglang_pool_sizes.py")
NOT_IN_SGLANG = {"bailing_moe_linear", "jamba", "minimax", "zamba2"}

REFUSED = {("zaya1-8b", 4)}  # its attention asserts that ranks share out the heads of keys; the sizes do not
CASES: dict[str, tuple[dict[str, Any], int]] = {
    f"{name}, tp {tp}": (dict(config), tp)
    for name, config in [*PUBLISHED.items(), *TINY.items()]
    for tp in (1, 2, 4)
    if config["model_type"] not in NOT_IN_SGLANG and (name, tp) not in REFUSED
}


@pytest.fixture(scope="module")
def sglang() -> dict[str, Any]:
    """SGLang's answers to all cases, and what it serves, from one process."""
    cases = [{"config": config, "tp": tp} for config, tp in CASES.values()]
    started = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_MAMBA_")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(cases), capture_output=True, text=True, env=started
    )  # a test that read a server's settings may have left types of states behind
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def sglang_says(sglang: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """SGLang's answer to every case by its name."""
    return dict(zip(CASES, sglang["answers"], strict=True))


@pytest.fixture
def theirs(name: str, sglang_says: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What SGLang says of the case; only an old one may lack the model."""
    said = sglang_says[name]
    if "lacks" in said:
        (pytest.fail if compat.complete() else pytest.skip)(f"SGLang {compat.engine_version()} lacks {said['lacks']}")
    return said


def test_every_hybrid_architecture_of_sglang_is_in_the_table(sglang: dict[str, Any]) -> None:
    """docs/models.md is written from the table, and the launcher refuses by it."""
    hybrids = sglang["hybrids"]
    drafts = ("NextN", "MTP")
    unknown = [name for name in hybrids["architectures"] if name not in ARCHITECTURES and not name.endswith(drafts)]
    assert not unknown, "SGLang serves hybrid models that core/served.py has no row for; add them, and their costs"
    known = {*FAMILIES, *UNPRICED, *(f"{name}_text" for name in FAMILIES)}
    without = {name: kind for name, kind in hybrids["model_types"].items() if kind not in known}
    assert not without, "SGLang has configurations with states that core/families neither prices nor refuses"
    listed = {row.model_type for row in ARCHITECTURES.values()}
    assert listed <= {*FAMILIES, *UNPRICED}


@since("0.5.21", "some models of the table")
def test_the_table_says_what_this_sglang_serves(sglang: dict[str, Any]) -> None:
    later = {name for name, row in ARCHITECTURES.items() if "from SGLang 0.5.23" in row.note}
    for name, row in ARCHITECTURES.items():
        if name not in later:
            assert (row.where is not Where.SPEC) == (name in sglang["hybrids"]["served"]), name
        if row.where is Where.CPU:  # where the launcher asks
            assert row.extra_buffer == (name in sglang["hybrids"]["extra_buffer"]), name


@pytest.mark.parametrize("name", CASES)
def test_bytes_per_token_and_per_state_are_sglangs(name: str, theirs: dict[str, Any]) -> None:
    config, tp = CASES[name]
    spec = from_config(config, tp=tp)
    if compat.pools_index():
        spec = spec.with_pooled_index()
    ours = {"conv": spec.conv_bytes, "temporal": spec.temporal_bytes, "kv": spec.kv_bytes_per_token}
    assert ours == {key: theirs[key] for key in ours}
    if "pool_slot" in theirs:
        assert spec.checkpoint_bytes == theirs["pool_slot"]


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_grid_is_sglangs(name: str, theirs: dict[str, Any]) -> None:
    config, tp = CASES[name]
    spec = from_config(config, tp=tp)
    if spec.is_recurrent:
        assert spec.chunk_tokens == (theirs["chunk"] or 64)
    else:
        assert spec.chunk_tokens == 1


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_a_server_has_gives_the_same_costs(name: str, theirs: dict[str, Any]) -> None:
    """`spec` reads config.json, a server what SGLang's configuration class made of it."""
    config, tp = CASES[name]
    assert costs(from_config(theirs["served"], tp=tp)) == costs(from_config(config, tp=tp))


def costs(spec: ModelSpec) -> tuple[object, ...]:
    return (spec.kv_bytes_per_token, spec.checkpoint_bytes, spec.conv_bytes, spec.chunk_tokens, spec.layers)


def test_small_states_were_really_allocated(sglang_says: dict[str, dict[str, Any]]) -> None:
    assert sum("pool_slot" in answer for answer in sglang_says.values()) >= 20
