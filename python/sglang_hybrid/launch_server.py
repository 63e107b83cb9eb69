"""`python -m sglang_hybrid.launch_server`: every SGLang flag and ours; checks, then hands over to SGLang's server."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import (
    announce_parent,
    collect_as_usual,
    collect_rarely,
    die_with_announced_parent,
    lose_lines_quietly,
    take_care_of_files,
)
from sglang_hybrid.engine.launch import platform
from sglang_hybrid.engine.processes import children, stop
from sglang_hybrid.plugin import activate_platform

_GRPC = ("grpc_mode", "smg_grpc_mode")

if __name__ == "__mp_main__":
    # A spawned child imports this module before anything of SGLang. SGLang binds its children to its own life too, but
    # seconds later, after its imports; and 0.5.17 needs the CPU platform this early.
    stop.leave_to_parent()
    die_with_announced_parent()
    lose_lines_quietly()
    collect_rarely()  # until SGLang loads the plugins
    activate_platform()


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped. Exit status: 2 for bad input, otherwise what SGLang's server ends with."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with stop.quick_end():
            return _serve(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except ImportError as error:
        print(f"error: a package is missing or broken; run sglang-hybrid doctor: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _serve(arguments: list[str]) -> int:
    from sglang_hybrid.engine.launch import early, flags, port, preparation

    config, rest = flags.split(arguments)
    seen = None if {"-h", "--help"} & set(rest) else early.read(rest)
    if seen is not None:
        port.take(seen.host, seen.port)
    preparation.enter(rest, config, seen)
    if seen is None:
        try:
            print(flags.help_text(), flush=True)  # noqa: T201
        except BrokenPipeError:  # `--help | head`; the rest would be written at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    namespace = flags.parse_engine(rest)
    port.take(namespace.host, namespace.port)
    final, notes = preparation.complete(namespace, rest, config)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)  # noqa: T201
    return _hand_over(final)


def _hand_over(arguments: list[str]) -> int:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs, prepare_server_args
    from sglang.srt.utils import kill_process_tree

    announce_parent()
    if platform.on_cpu():
        children.copy_instead_of_spawn()
    _before_the_port_is_bound()
    with _refused_by_sglang():
        prepared = prepare_server_args(arguments)
        if hasattr(prepared, "resolve_once") and not any(getattr(prepared, key, False) for key in _GRPC):
            prepared.resolve_once()  # 0.5.17 has done so; for gRPC, SGLang changes the arguments before it does
    check = ServerArgs.check_server_args

    def checked(self: ServerArgs) -> None:
        with _refused_by_sglang():
            check(self)

    ServerArgs.check_server_args = checked  # once, and by SGLang: what it checks it may also change
    try:
        run_server(prepared)
    finally:
        stop.over.set()
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # SGLang's watchdog may be about to report a child that ends here
        kill_process_tree(os.getpid(), include_parent=False)
    return stop.status()


@contextmanager
def _refused_by_sglang() -> Iterator[None]:
    """Arguments that do not go together end in ConfigError, whatever SGLang raises for them."""
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"SGLang refuses these arguments: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What an error says, or the line that raised it: most assertions of SGLang say nothing."""
    return str(error) or traceback.extract_tb(error.__traceback__)[-1].line or repr(error)


def _before_the_port_is_bound() -> None:
    """Check the port once more right before uvicorn binds it: the model took a while to load.

    When uvicorn itself fails to bind, SGLang's server waits minutes for its own warm-up requests before it ends.
    Nothing is imported after it, so garbage is collected as usual from there on.
    """
    import uvicorn

    from sglang_hybrid.engine.launch import port

    startup = uvicorn.Server.startup

    async def checked(server: uvicorn.Server, sockets: list[Any] | None = None) -> None:
        if sockets is None:  # several tokenizer workers inherit a socket that is bound already
            port.check(server.config.host, server.config.port)
        collect_as_usual()
        await startup(server, sockets)
        port.release()

    uvicorn.Server.startup = checked  # type: ignore[method-assign]


if __name__ == "__main__":
    take_care_of_files()
    children.keep_one_thread()
    stop.hold_back_in_children()
    collect_rarely()  # until the port is bound
    sys.exit(main())
