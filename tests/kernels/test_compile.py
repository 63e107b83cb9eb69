"""Every registered kernel compiles for sm_80 and sm_90, and every kernel of the package is registered."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import sglang_hybrid_kernels

PACKAGE = Path(sglang_hybrid_kernels.__file__).parent


@pytest.fixture(scope="module")
def ahead_of_time() -> Any:
    return importlib.import_module("benchmarks.kernels.compile")


def kernels(operation: str) -> set[str]:
    """Names of the operation's functions that are launched: those decorated with triton.jit and called *_kernel."""
    tree = ast.parse((PACKAGE / operation / "triton.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}


@pytest.mark.parametrize("operation", sorted(file.parent.name for file in PACKAGE.glob("*/triton.py")))
def test_every_kernel_compiles_for_both_architectures(ahead_of_time: Any, operation: str):
    seen = set()
    for case in ahead_of_time.cases(operation):
        for target, capability in ahead_of_time.TARGETS.items():
            for row in ahead_of_time.compiled(case, capability):
                seen.add(row["kernel"])
                assert 0 < row["registers"] <= 255, row
                assert row["shared_bytes"] <= ahead_of_time.SHARED_BYTES[target], row
    assert seen >= kernels(operation)
