"""What docs/deploy.md says of a wheel: built from the checkout, it works without one beside SGLang's packages."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sglang_hybrid.demo.model import READERS
from sglang_hybrid.demo.reader import weights

ROOT = Path(__file__).parents[3]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["COLUMNS"] = "120"
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel of its own and every other package of this one; its folder."""
    here = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "-w", here / "dist", ROOT, cwd=here)
    run(sys.executable, "-m", "venv", "--without-pip", here / "venv", cwd=here)
    (wheel,) = (here / "dist").glob("sglang_hybrid-*.whl")
    run(*pip, "--python", here / "venv", "install", "--no-deps", wheel, cwd=here)
    packages = run(here / "venv/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=here)
    # Behind the wheel; the editable install of this environment is not read from there.
    (here / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n")
    Path(packages.strip(), "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return here


def test_the_wheel_is_what_runs(installed: Path) -> None:
    where = run(
        installed / "venv/bin/python", "-c", "import sglang_hybrid; print(sglang_hybrid.__file__)", cwd=installed
    )
    assert Path(where.strip()).is_relative_to(installed)
    kernels = "import sglang_hybrid_kernels; print(sglang_hybrid_kernels.__file__)"
    assert Path(run(installed / "venv/bin/python", "-c", kernels, cwd=installed).strip()).is_relative_to(installed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["version"], "0.1.0"),
        (["spec", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--memory-gb", "40"], "states"),
        (["simulate", "trace.csv", "--capacity-gb", "1", "--model", "marconi-7b"], "tokens"),
        (["doctor"], "sglang "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_its_command(installed: Path, arguments: list[str], said: str) -> None:
    assert said in run(installed / "venv/bin/sglang-hybrid", *arguments, cwd=installed)


def test_its_environment_imports_what_torchvision_breaks(installed: Path) -> None:
    python = installed / "venv/bin/python"
    run(python, "-m", "sglang_hybrid.cpu_environment", cwd=installed)
    assert "Llama" in run(
        python, "-c", "from transformers import LlamaConfig; print(LlamaConfig.__name__)", cwd=installed
    )
    assert "0." in run(python, "-c", "import torchvision; print(torchvision.__version__)", cwd=installed)
    clean = "import sys; print({'torch', 'sglang', 'argparse'} & set(sys.modules))"
    assert run(python, "-c", clean, cwd=installed).strip() == "set()", "every start of Python would pay for it"
    run(python, "-m", "sglang_hybrid.cpu_environment", "--remove", cwd=installed)


@pytest.mark.parametrize("model", READERS)
def test_it_holds_the_readers(installed: Path, model: str) -> None:
    """Weights, cards and tokenizer: a folder that servers load is made from the wheel alone."""
    run(installed / "venv/bin/python", "-m", "sglang_hybrid.demo.model", model, "--preset", model, cwd=installed)
    made = {file.name for file in (installed / model).iterdir()}
    assert made >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert ("mtp.safetensors" in made) == (weights.head(model) is not None)
    (folder,) = installed.glob("venv/lib/python3*/site-packages/sglang_hybrid/demo/reader/weights")
    assert (folder / f"{model}.md").read_text().startswith(f"# {model}\n")
    assert (folder / f"{model}.safetensors").read_bytes() == weights.path(model).read_bytes()
