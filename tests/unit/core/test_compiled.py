"""The compiled form: removed unless its sources are those it was built from, and deciding what they decide."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sglang_hybrid.prefix
from sglang_hybrid.core.compiled import SUFFIX, form
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.tree.mark import Kind
from sglang_hybrid.sim.bootstrap import LoggedRequest, ReplayJob, replay_hit_tokens
from sglang_hybrid.sim.snapshot import SavedMark, Snapshot

DECIDE = """
import zlib
import sglang_hybrid.prefix
from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim import open_cache
from sglang_hybrid.sim.workloads import parse
crc = 0
for policy in ("lru", "gdsf", "marconi", "forecast"):
    cache = open_cache(policy, 2_000_000_000, preset("marconi-7b"))
    for r in parse("agentic?seed=3&sessions=6").requests:
        crc = zlib.crc32(repr((cache.lookup(r.tokens[: r.n_input], r.ts),
                               cache.commit(r.tokens, r.n_input, r.ts))).encode(), crc)
    cache.check()
print(sglang_hybrid.prefix.FORM, crc)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two modules, one of them in a folder, with the extensions built from them."""
    (tmp_path / "inner").mkdir()
    for name in ("__init__", "cache", "inner/__init__", "inner/tree"):
        source = tmp_path / f"{name}.py"
        source.touch()
        os.utime(source, (100, 100))
    for name in ("cache", "inner/tree", "native__mypyc"):
        extension = tmp_path / f"{name}{SUFFIX}"
        extension.touch()
        os.utime(extension, (200, 200))
    return tmp_path


def test_extensions_of_these_sources_are_used(package: Path) -> None:
    assert form(package) == "compiled"


def test_without_a_build_or_with_another_python_s_the_sources_run(package: Path) -> None:
    for path in package.rglob(f"*{SUFFIX}"):
        path.rename(path.with_name(path.name.replace(SUFFIX, ".cpython-39-riscv.so")))
    assert form(package) == "interpreted"


@pytest.mark.parametrize(
    ("change", "named"), [("edit", "inner/tree"), ("add", "new"), ("remove", "cache"), ("rename", "caches")]
)
def test_a_changed_source_is_never_shadowed(
    package: Path, change: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    if change == "edit":
        os.utime(package / "inner/tree.py", (300, 300))
    elif change == "add":
        (package / "new.py").touch()
    elif change == "remove":
        (package / "cache.py").unlink()
    else:
        (package / "cache.py").rename(package / "caches.py")
    assert form(package) == "interpreted"
    assert not list(package.rglob(f"*{SUFFIX}")), "what is out of date would be imported first"
    assert re.search(rf"scripts/compile.*: .*\b{named}\b", caplog.text)


def test_what_cannot_be_removed_stops_the_import(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    os.utime(package / "cache.py", (300, 300))
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ImportError, match=r"delete .*Permission denied.*: cache"):
        form(package)


def test_modules_that_are_not_compiled_may_change(package: Path) -> None:
    os.utime(package / "__init__.py", (300, 300))
    assert form(package) == "compiled"


def test_both_forms_decide_the_same(tmp_path: Path) -> None:
    """Where nothing is compiled, this compares the sources with a copy of them."""
    installed = Path(sglang_hybrid.__file__).parent
    copied = tmp_path / "sources"
    shutil.copytree(installed, copied / "sglang_hybrid", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    found = []
    for folder in (installed.parent, copied):
        environment = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", DECIDE]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        found.append(run.stdout.split())
    assert found[0][0] == sglang_hybrid.prefix.FORM
    assert found[1][0] == "interpreted"
    assert found[0][1] == found[1][1]


def test_replays_go_to_other_processes_in_either_form() -> None:
    tokens = np.arange(600, dtype=np.int32)
    snapshot = Snapshot((tokens[:300],), (SavedMark(0, 300, Kind.FRESH, 1, 0.0, 1),))
    job = ReplayJob(preset("marconi-7b"), 10**9, snapshot, (LoggedRequest(tokens, 500, 1.0),), 0.5)
    assert replay_hit_tokens(pickle.loads(pickle.dumps(job))) == 300
