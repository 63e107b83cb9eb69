"""Trace files as they lie about: plain, compressed with gzip or Zstandard, a folder of them, or standard input."""

import gzip
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sglang_hybrid.core.reading import printable
from sglang_hybrid.sim.trace import TraceError

STDIN = "-"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_COMPRESSED = (".gz", ".zst")


def files_of(path: Path) -> list[Path]:
    """The file at `path`, or the files of that folder in name order, hidden ones left out; raises TraceError."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceError(f"no such trace file; give a file, a folder, - or workload:NAME: {path}")
    files = sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith("."))
    if not files:
        raise TraceError(f"the folder holds no trace file; put at least one into it: {path}")
    return files


def name_of(path: Path) -> str:
    """What reports call the trace at `path`: no folder, no suffix."""
    name = path.resolve().name if path.is_dir() else path.name
    while name.endswith(_COMPRESSED):
        name = name.rpartition(".")[0]
    return printable(name if path.is_dir() else Path(name).stem)


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The content of `path`, decompressed, for reading once; raises TraceError also for what fails within."""
    try:
        with path.open("rb") as file:
            yield io.BufferedReader(_decompressed(file, path), 1 << 16)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"the compressed file is cut or damaged ({error}); write it again: {path}") from error
    except OSError as error:
        raise TraceError(f"the trace file cannot be read ({error.strerror or error}): {path}") from error


@contextmanager
def plain(path: Path) -> Iterator[Path]:
    """`path`, or a decompressed copy of it while the context lasts."""
    with opened(path) as content, tempfile.TemporaryDirectory() as folder:
        with path.open("rb") as file:
            if not _is_compressed(file):
                yield path
                return
        copy = Path(folder) / path.name
        with copy.open("wb") as out:
            shutil.copyfileobj(content, out)
        yield copy


@contextmanager
def spooled() -> Iterator[Path]:
    """Standard input as a file while the context lasts: processes read a trace again, which a pipe cannot give."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "stdin"
        with path.open("wb") as out:
            shutil.copyfileobj(sys.stdin.buffer, out)
        yield path


def _is_compressed(file: IO[bytes]) -> bool:
    head = file.read(4)
    file.seek(0)
    return head.startswith(_GZIP) or head == _ZSTD


def _decompressed(file: IO[bytes], path: Path) -> Any:
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)
    if head != _ZSTD:
        return file
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(f"install a package to read .zst files, pip install zstandard: {path}") from error
    return _Zstd(zstandard, file)


class _Zstd(io.RawIOBase):
    """A decompressing reader of one frame after the other, whose errors are those of a damaged file, as gzip's are."""

    def __init__(self, zstandard: Any, file: IO[bytes]) -> None:
        self._zstandard, self._file = zstandard, file
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (chunk := self._file.read(1 << 16)):
            self._ready = self._decompress(chunk)
        if not self._ready and self._frame is not None:
            raise EOFError("the last frame has no end")
        data, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def _decompress(self, chunk: bytes) -> bytes:
        parts = []
        try:
            while chunk:
                self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
                parts.append(self._frame.decompress(chunk))
                chunk = b""
                if self._frame.eof:
                    chunk, self._frame = self._frame.unused_data, None
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        return b"".join(parts)
