"""Files a command will write: refused before the work where they cannot be written, not after it."""

from pathlib import Path

from sglang_hybrid.core.errors import ConfigError


def check_output(path: Path) -> None:
    """Raise ConfigError unless `path` can be written now; its folders are made, a file that is there is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """What to say of an output that cannot be written."""
    return ConfigError(f"choose another file, this one cannot be written ({error.strerror}): {path}")
