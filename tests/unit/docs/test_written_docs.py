"""Tables that are written from the code are up to date, and pages lead to each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_hybrid.core.config import HybridConfig, read_mapping
from sglang_hybrid.engine.launch import flags
from tests import docs_tables

ROOT = docs_tables.ROOT
PAGES = sorted((ROOT / "docs").glob("*.md"))
PACKAGE = ROOT / "python/sglang_hybrid"


@pytest.mark.parametrize("path", docs_tables.documents(), ids=lambda path: path.name)
def test_what_is_written_from_the_code_is_up_to_date(path: Path) -> None:
    assert path.read_text("utf-8") == docs_tables.documents()[path], "python -m tests.docs_tables"


def test_every_table_has_a_place() -> None:
    asked = re.findall(r"<!-- table: (\w+) -->", "".join(path.read_text("utf-8") for path in PAGES))
    assert sorted(asked) == sorted(docs_tables.tables())


def test_a_changed_table_is_noticed() -> None:
    page = "a\n<!-- table: events -->\n| old |\n<!-- end -->\nb\n"
    filled = docs_tables.filled(page)
    assert filled.startswith("a\n<!-- table: events -->\n| event | counts |\n|---|---|\n| `boundaries` |")
    assert filled.endswith("<!-- end -->\nb\n")
    assert docs_tables.filled(filled) == filled


def test_the_configuration_file_has_every_setting_at_its_default() -> None:
    path = str(ROOT / "deploy/hybrid.yaml")
    config, rest = flags.split(["--hybrid-config", path, "--port", "1"])
    assert (config, rest) == (HybridConfig(), ["--port", "1"])
    assert set(read_mapping(path)) == set(HybridConfig.__dataclass_fields__)


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_files_that_are_named_are_there(path: Path) -> None:
    ours = {folder.name for folder in (PACKAGE, PACKAGE / "engine") for folder in folder.iterdir() if folder.is_dir()}
    roots = (ROOT, PACKAGE, PACKAGE / "engine", PACKAGE / "engine/frontend", PACKAGE / "engine/cache")
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", path.read_text("utf-8")):
        if name.partition("/")[0] in {*ours, "tests", "benchmarks", "studies", "kernels", "python"}:
            assert any((root / name).is_file() for root in roots), name


@pytest.mark.parametrize("name", ["misses.md", "metrics.md", "tuning.md", "deploy.md", "traces.md"])
def test_readme_leads_to_what_an_operator_needs(name: str) -> None:
    assert f"(docs/{name})" in (ROOT / "README.md").read_text("utf-8")
