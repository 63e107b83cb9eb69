"""SGLang, imported once on the CPU platform; its own import-time deprecations are not ours to raise."""

import json
import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from sglang_hybrid.core.config import ENVIRONMENT_KEY, HybridConfig


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as launched:
        launched.setenv(ENVIRONMENT_KEY, "")
        HybridConfig().leave()
        warnings.simplefilter("ignore")
        import sglang.launch_server
        from sglang.srt.plugins import load_plugins

        load_plugins()
    assert sglang.launch_server.run_server


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a launcher under test sets is gone when its test ends: the next one may start a server."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def configure() -> Iterator[Callable[..., None]]:
    """A function that gives the HTTP process settings, until the test ends."""
    from sglang_hybrid.engine.frontend.settings import settings

    def configured(**values: str) -> None:
        os.environ[ENVIRONMENT_KEY] = json.dumps(values)
        settings.cache_clear()

    yield configured
    settings.cache_clear()
