"""SGLang, imported once on the CPU platform; its own import-time deprecations are not ours to raise."""

import os
import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.launch_server
        from sglang.srt.plugins import load_plugins

        load_plugins()
    assert sglang.launch_server.run_server
