"""The compiled form: used while the sources are those it was built from, and deciding what they decide."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sglang_hybrid.prefix.snapshot import SavedMark, Snapshot

import sglang_hybrid.prefix
from sglang_hybrid.core import compiled
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.mark import Kind
from sglang_hybrid.prefix.tuner import LoggedRequest, ReplayJob, replay_hit_tokens

DECIDE = """
import zlib
import sglang_hybrid.prefix.cache as module
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
print(module.__file__.endswith(".py"), crc)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    for name in ("__init__", "cache", "tree"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n", encoding="utf-8")
    built = compiled.folder(tmp_path)
    built.mkdir(parents=True)
    (built / compiled.STAMP).write_text(compiled.digest(compiled.sources(tmp_path)) + "\n", encoding="ascii")
    return tmp_path


def test_a_true_compiled_form_comes_first_in_the_path(package: Path) -> None:
    path = [str(package)]
    assert compiled.use(path) == "compiled"
    assert path == [str(compiled.folder(package)), str(package)]


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_edited_sources_are_never_shadowed(package: Path, change: str) -> None:
    if change == "edit":
        (package / "tree.py").write_text("tree = 2\n", encoding="utf-8")
    elif change == "add":
        (package / "new.py").touch()
    elif change == "remove":
        (package / "tree.py").unlink()
    else:
        (package / "tree.py").rename(package / "trees.py")
    path = [str(package)]
    assert compiled.use(path) == "interpreted: the sources have changed since scripts/compile"
    assert path == [str(package)]


def test_modules_that_are_not_compiled_may_change(package: Path) -> None:
    (package / "__init__.py").write_text("changed = 1\n", encoding="utf-8")
    assert compiled.status(package) == "compiled"


def test_the_interpreter_can_be_asked_for(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "0")
    assert compiled.status(package) == f"interpreted: {compiled.VARIABLE}=0"


def test_without_a_build_the_sources_run(package: Path) -> None:
    shutil.rmtree(compiled.folder(package))
    assert compiled.status(package).startswith("interpreted: scripts/compile has not run")


def test_both_forms_decide_the_same() -> None:
    if sglang_hybrid.prefix.FORM != "compiled":
        pytest.skip(sglang_hybrid.prefix.FORM)
    found = []
    for value in ("0", "1"):
        environment = os.environ | {compiled.VARIABLE: value}
        run = subprocess.run(
            [sys.executable, "-c", DECIDE], env=environment, capture_output=True, text=True, check=True
        )
        found.append(run.stdout.split())
    assert [is_source for is_source, _ in found] == ["True", "False"]
    assert found[0][1] == found[1][1]


def test_replays_go_to_other_processes_in_either_form() -> None:
    tokens = np.arange(600, dtype=np.int32)
    snapshot = Snapshot((tokens[:300],), (SavedMark(0, 300, Kind.FRESH, 1, 0.0, 1),))
    job = ReplayJob(preset("marconi-7b"), 10**9, snapshot, (LoggedRequest(tokens, 500, 1.0),), 0.5)
    assert replay_hit_tokens(pickle.loads(pickle.dumps(job))) == 300
