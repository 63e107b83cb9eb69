"""Makes torch warn of every call in which the host waits for the card; first on the path of a server's processes."""

import sys
import threading
import time
import warnings


def _watch() -> None:
    while True:  # torch is imported later, and only some processes use the card
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if cuda is not None and getattr(cuda, "is_initialized", bool)() and hasattr(cuda, "set_sync_debug_mode"):
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
            cuda.set_sync_debug_mode("warn")
            return
        time.sleep(0.2)


threading.Thread(target=_watch, daemon=True).start()
