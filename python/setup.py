"""The optional compiled form of the prefix cache: `python setup.py build_ext --inplace` in this folder, by mypyc.

`scripts/compile` runs it. The package itself is built by hatchling from ../pyproject.toml and is pure Python.
"""

from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup

sources = sorted(str(path) for path in Path("sglang_hybrid/prefix").rglob("*.py") if path.name != "__init__.py")
setup(
    name="sglang-hybrid-prefix",
    packages=[],
    ext_modules=mypycify(
        ["--strict", "--explicit-package-bases", *sources],
        opt_level="2",
        debug_level="0",
        group_name="sglang_hybrid.prefix.native",
        target_dir="../build/mypyc",
    ),
)
