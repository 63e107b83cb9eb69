"""Every folder of the product is a package: what reads imports sees no other."""

from __future__ import annotations

from pathlib import Path

import pytest

import sglang_hybrid
import sglang_hybrid_kernels


@pytest.mark.parametrize("package", [sglang_hybrid, sglang_hybrid_kernels])
def test_folders_with_modules_are_packages(package: object) -> None:
    root = Path(str(package.__file__)).parent  # type: ignore[attr-defined]
    folders = {file.parent for file in root.rglob("*.py")}
    assert len(folders) > 1
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
