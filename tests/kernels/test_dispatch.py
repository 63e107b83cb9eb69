"""Which backend a call takes, and that the package imports without Triton."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from sglang_hybrid_kernels import dispatch


@pytest.fixture(autouse=True)
def _read_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch.mode.cache_clear()
    yield
    dispatch.mode.cache_clear()


def test_without_a_word_the_device_decides():
    assert dispatch.backend_for(torch.zeros(1)) == "naive"
    assert set(dispatch.describe("cuda").values()) == {"triton"}
    assert set(dispatch.describe("cpu").values()) == {"naive"}
    assert dispatch.describe() == dispatch.describe("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_the_environment_decides_for_every_device(monkeypatch: pytest.MonkeyPatch, backend: str):
    monkeypatch.setenv(dispatch.VARIABLE, backend)
    assert dispatch.backend_for(torch.zeros(1)) == backend
    assert set(dispatch.describe("cuda").values()) == set(dispatch.describe("cpu").values()) == {backend}


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch):
    assert dispatch.mode() == "auto"
    monkeypatch.setenv(dispatch.VARIABLE, "naive")
    assert dispatch.mode() == "auto"


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ValueError, match="auto, naive, triton: 'fast'"):
        dispatch.backend_for(torch.zeros(1))


def test_operations_need_no_triton_to_be_imported():
    """Every operation imports, and answers on the CPU, where `import triton` fails."""
    names = dispatch.operations()
    assert names
    code = (
        "import importlib, sys; sys.modules['triton'] = None\n"
        f"for name in {names}:\n"
        "    assert callable(getattr(importlib.import_module(f'sglang_hybrid_kernels.{name}'), name))"
    )
    environment = {key: value for key, value in os.environ.items() if key != dispatch.VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
