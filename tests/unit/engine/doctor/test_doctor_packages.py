"""`sglang-hybrid doctor` where packages are missing or broken: a row with the right remedy each, and no traceback."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.doctor import packages
from sglang_hybrid.engine.pools import remote

BREAK = """
import importlib.metadata, sys
from pathlib import Path
from types import SimpleNamespace

broken, how, place, *arguments = sys.argv[1:]


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == broken:
            if how == "missing":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if how == "changed":
                raise ImportError("cannot import name 'x' from 'transformers'", name="transformers")
            raise RuntimeError("operator nms does not exist")


def version(name, known=importlib.metadata.version):
    if how == "missing" and name.replace("-", "_") == broken:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)


sys.meta_path.insert(0, Refuse())
importlib.metadata.version = version

from sglang_hybrid import cli, launch_server
from sglang_hybrid.engine.doctor import packages

packages.shutil = SimpleNamespace(which=lambda _: None)  # no GPU
if place == "wheel":
    packages._SETUP = Path("no such file")
if arguments[0] == "serve":  # what it becomes, in this broken process
    sys.exit(launch_server.main(arguments[1:]))
sys.exit(cli.main(arguments))
"""

CPU = "--index-url https://download.pytorch.org/whl/cpu"
MACHINE = ("memory", "shared")
"""Rows on what this machine has free."""

SLOW = pytest.mark.slow
AGAIN = "run pip install --force-reinstall --no-deps"


def in_broken(module: str, how: str, place: str, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", BREAK, module, how, place, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "how", "subject", "remedy"),
    [
        ("torch", "missing", "torch", rf"run pip install torch==[\d.]+ {CPU}"),
        ("torch", "broken", "torch", rf"{AGAIN} torch==[\d.]+ {CPU}"),
        ("numpy", "missing", "numpy", "run pip install numpy"),
        ("transformers", "missing", "transformers", r"run pip install transformers==[\d.]+"),
        ("transformers", "broken", "transformers", rf"{AGAIN} transformers==[\d.]+"),
        pytest.param("xgrammar", "missing", "xgrammar", r"run pip install xgrammar==[\d.]+", marks=SLOW),
        pytest.param("openai", "missing", "openai", r"run pip install openai==[\d.]+", marks=SLOW),
        ("fastapi", "missing", "fastapi", "run pip install fastapi"),
        pytest.param("uvicorn", "missing", "uvicorn", "run pip install uvicorn", marks=SLOW),
        ("zmq", "missing", "pyzmq", "run pip install pyzmq"),
        pytest.param("psutil", "missing", "psutil", "run pip install psutil", marks=SLOW),
        pytest.param(
            "prometheus_client", "missing", "prometheus_client", "run pip install prometheus_client", marks=SLOW
        ),
        ("sglang", "missing", "sglang", r"run pip install --no-deps sglang==0\.5\.21 torchvision==[\d.]+"),
        ("sglang", "broken", "sglang", rf"{AGAIN} sglang==0\.5\.21 torchvision==[\d.]+"),
        ("sglang", "changed", "sglang", rf"{AGAIN} transformers==[\d.]+"),
        ("pybase64", "missing", "sglang", "run pip install pybase64"),
    ],
)
def test_each_row_names_its_remedy(module: str, how: str, subject: str, remedy: str) -> None:
    status, shown, _ = in_broken(module, how, "wheel", "doctor")
    assert status == 1
    problems = dict(re.findall(r"^PROBLEM +(\S+).*\n +-> (.*)$", shown, re.MULTILINE))
    assert re.fullmatch(remedy, problems.pop(subject)), shown
    assert "lacks what" not in shown
    if subject != "sglang":
        assert problems.pop("sglang") == f"mend {module} first, then run doctor again"
    assert all(said == f"mend {module} first" for name, said in problems.items() if name not in MACHINE), shown


def test_half_of_this_package_is_named() -> None:
    """Two copies, one before the other: PYTHONPATH=python, and the kernels are not there."""
    status, shown, _ = in_broken("sglang_hybrid_kernels", "missing", "wheel", "doctor")
    assert status == 1
    problems = dict(re.findall(r"^PROBLEM +(\S+).*\n +-> (.*)$", shown, re.MULTILINE))
    assert problems["device"].startswith("install this package again"), shown


def test_a_checkout_has_a_script() -> None:
    status, shown, _ = in_broken("xgrammar", "missing", "checkout", "doctor")
    assert status == 1
    assert "-> run scripts/setup, or pip install xgrammar==" in shown


@pytest.mark.parametrize("module", ["torch", "numpy", "psutil", "sglang"])
def test_doctor_of_a_server_needs_none_of_them(module: str) -> None:
    status, _, error = in_broken(module, "missing", "wheel", "doctor", "--url", "http://127.0.0.1:9")
    assert status == 2
    assert "no server answers there" in error


def test_what_answers_need_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers = threading.Thread(target=_garbage, args=(listener,))
        answers.start()
        with pytest.raises(ConfigError, match="no server answers there"):
            remote.fetch("http://{}:{}".format(*listener.getsockname()))
        answers.join()


def _garbage(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"\0garbage\r\n\r\n")


@pytest.mark.parametrize("module", ["torch", "numpy", "sglang"])
def test_serve_sends_to_doctor(module: str) -> None:
    status, _, error = in_broken(module, "missing", "wheel", "serve", "--model-path", "Org/Name", "--port", "31995")
    assert status == 2
    assert "sglang-hybrid doctor" in error.splitlines()[-1]


def test_the_versions_are_those_of_the_setup() -> None:
    script = (Path(__file__).parents[4] / "scripts" / "setup").read_text()
    primary = script.split("\nprimary=")[1].split("\n")[0]
    installed = script.replace('"sglang==$sglang"', f"sglang=={primary}")
    assert packages.remedy("sglang").removesuffix(".").split("--no-deps ")[1] in installed
