"""Kernels keep to what every Triton of a supported SGLang compiles, and one that is not there is no pass."""

import ast
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import sglang_hybrid_kernels
from benchmarks.kernels import toolchains
from sglang_hybrid.engine import compat

FILES = sorted(Path(sglang_hybrid_kernels.__file__).parent.glob("*/triton.py"))


def bare_elements(source: str) -> list[str]:
    """Arguments of tl.static_range that are elements of a tuple and not wrapped in tl.constexpr."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    ranges = [call for call in calls if ast.unparse(call.func) == "tl.static_range"]
    return [ast.unparse(argument) for call in ranges for argument in call.args if isinstance(argument, ast.Subscript)]


def test_elements_of_constant_tuples_are_wrapped_where_a_constant_is_needed():
    """Triton 3.6 hands out plain ints, which its static_range refuses."""
    assert bare_elements("for d in tl.static_range(INNER[p]): pass") == ["INNER[p]"]
    assert {file.parent.name: found for file in FILES if (found := bare_elements(file.read_text()))} == {}


def test_the_oldest_supported_sglang_has_its_triton_in_the_list():
    assert ".".join(map(str, compat.OLDEST)) in toolchains.PINNED
    assert "3.6.0" in toolchains.PINNED.values()


def test_a_triton_that_cannot_be_fetched_is_a_failure_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"unpack the wheel of Triton 9\.9\.9 to"):
        toolchains.compiled("9.9.9", cache=tmp_path)
    monkeypatch.setattr("sys.argv", ["toolchains.py", "--version", "9.9.9", "--cache", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"not compiled by Triton: 9\.9\.9"):
        toolchains.main()
    assert "Triton 9.9.9: not available: " in capsys.readouterr().out


def test_a_process_with_another_triton_than_the_one_asked_for_compiles_nothing(monkeypatch: pytest.MonkeyPatch):
    import benchmarks.kernels.compile as ahead_of_time

    monkeypatch.setattr("sys.argv", ["compile.py", "--expect-triton", "9.9.9", "--no-write"])
    monkeypatch.setattr(ahead_of_time, "cases", refuse)
    with pytest.raises(SystemExit, match=rf"put Triton 9\.9\.9 first .* {importlib.metadata.version('triton')}"):
        ahead_of_time.main()


def refuse(*_: Any) -> Any:
    raise AssertionError("nothing may be compiled")
