"""Every registered kernel compiles for sm_80 and sm_90, and every kernel of the package is registered."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import sglang_hybrid_kernels

PACKAGE = Path(sglang_hybrid_kernels.__file__).parent
INDEX_LOAD = "ld.global.b64"
"""The slots of a pair."""


@pytest.fixture(scope="module")
def ahead_of_time() -> Any:
    return importlib.import_module("benchmarks.kernels.compile")


def kernels(operation: str) -> set[str]:
    """Names of the operation's functions that are launched: those decorated with triton.jit and called *_kernel."""
    tree = ast.parse((PACKAGE / operation / "triton.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("operation", sorted(file.parent.name for file in PACKAGE.glob("*/triton.py")))
def test_every_kernel_compiles(ahead_of_time: Any, operation: str, target: str):
    seen = set()
    for case in ahead_of_time.cases(operation):
        for row in ahead_of_time.compiled(case, ahead_of_time.TARGETS[target]):
            seen.add(row["kernel"])
            assert 0 < row["registers"] <= 255, row
            assert row["shared_bytes"] <= ahead_of_time.SHARED_BYTES[target], row
    assert seen >= kernels(operation)


def test_copies_of_states_and_windows_move_sixteen_bytes_and_share_nothing(ahead_of_time: Any):
    """float32 states with bfloat16 windows, in SGLang's layout and in that of elastic memory."""
    cases = [case for case in ahead_of_time.cases("copy_slots") if " within" in case.name]
    assert any("page-major" in case.name for case in cases)
    for case in cases:
        for capability in ahead_of_time.TARGETS.values():
            (row,) = ahead_of_time.compiled(case, capability)
            moves = {name: count for name, count in row["memory"].items() if name != INDEX_LOAD}
            assert set(moves) == {"ld.global.v4.b32", "st.global.v4.b32"}, row
            assert row["shared_bytes"] == row["spill_bytes"] == 0, row


def test_the_memory_instructions_of_a_kernel_are_counted(ahead_of_time: Any):
    ptx = """
        ld.global.b64 %rd1, [%rd2];
        @%p1 ld.global.L1::evict_last.v4.b32 {%r1, %r2, %r3, %r4}, [%rd3 + 0];
        st.shared.v2.b32 [%r5], {%r1, %r2};
        ld.shared.b32 %r6, [%r5];
        st.global.b16 [%rd4], %rs1;
        st.global.b16 [%rd4 + 2], %rs1;
    """
    assert ahead_of_time.memory(ptx) == {
        "ld.global.b64": 1, "ld.global.v4.b32": 1, "ld.shared.b32": 1, "st.global.b16": 2, "st.shared.v2.b32": 1,
    }  # fmt: skip
