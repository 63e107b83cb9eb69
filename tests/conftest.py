"""Generated examples are the same in every run, whatever the machine; `--hypothesis-profile=explore` draws new ones."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_LOADED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no failure
settings.register_profile("repeat", derandomize=True, **_LOADED)
settings.register_profile("explore", **_LOADED)
settings.load_profile("repeat")

UNTIL = "SGLANG_HYBRID_TESTS_UNTIL"
"""In seconds of the epoch: what has not begun by then is skipped, so that a slow machine ends with a result."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(f"the time is over: {UNTIL}")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a demo model by preset name, built once."""
    from sglang_hybrid.demo import model

    root = tmp_path_factory.mktemp("models")
    return lambda preset: model.build(root / preset, preset)


@pytest.fixture
def fixed_order() -> Iterator[None]:
    """PyTorch's products and sums have an order that depends on no shape and no machine: equal bits prove something."""
    from tests.kernels.fixed_order import FixedOrder

    with FixedOrder():
        yield
