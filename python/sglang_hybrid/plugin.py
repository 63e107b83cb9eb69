"""Entry points SGLang calls in every process of a server: they register and return, and import nothing heavy.

SGLang logs an error raised here and goes on, so nothing relies on these calls having worked: the radix cache backend
`hybrid`, which only exists if `register` ran, checks everything else before the first request (engine/backend.py).
"""

from multiprocessing import parent_process


def activate_platform() -> None:
    """Entry point `sglang.srt.platforms`: on a plain CPU, provide what SGLang imports but no registry has.

    Returns None, which tells SGLang to keep its own CPU platform.
    """
    from sglang_hybrid.engine.launch import platform

    if platform.on_cpu():
        from sglang_hybrid.engine import cpu

        cpu.install()


def register() -> None:
    """Entry point `sglang.srt.plugins`: register the cache backend and, on a plain CPU, the platform hooks."""
    from sglang_hybrid.core.process import collect_as_usual
    from sglang_hybrid.engine import backend

    backend.register()
    if parent_process() is not None:  # a server's child, whose imports are done
        collect_as_usual()
