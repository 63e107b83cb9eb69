"""Every benchmark says what it takes, and runs only when asked rightly."""

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import provenance

COMMANDS = [path for path in provenance.ROOT.glob("benchmarks/**/*.py") if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.relative_to(provenance.ROOT)))
def test_every_command_reads_its_arguments(path: Path) -> None:
    assert "parse_args(" in path.read_text() or "no_arguments(" in path.read_text()


@pytest.mark.parametrize("name", ["popularity", "tables", "figures"])
@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--hepl", 2)])
def test_to_ask_for_help_writes_no_result(
    name: str, argument: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, argument])
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(provenance.ROOT / f"benchmarks/sim/{name}.py"), run_name="__main__")
    assert ended.value.code == status
    said = capsys.readouterr()
    assert "usage" in said.out + said.err
