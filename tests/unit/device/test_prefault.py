import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.device.prefault import Prefaulter
from sglang_hybrid.memory.backing import Run

G = 2 << 20


def test_the_critical_path_maps_what_the_thread_created(cuda):
    with (
        PooledBacking(CudaDriver(0, api=cuda), [16], G, limit=16) as backing,
        Prefaulter(backing, pooled=6) as prefaulter,
    ):
        prefaulter.wait()
        calls = len(cuda.calls)
        backing.map([Run(0, 0, 2)])
        assert "cuMemCreate" not in [call[0] for call in cuda.calls[calls:]]
        assert backing.at_hand == 4
        backing.map([Run(0, 2, 1)])  # half of them are gone: it wakes by itself
        prefaulter.wait()
        backing.check()
        assert (backing.at_hand, backing.committed_bytes) == (6, 9 * G)
        assert prefaulter.error is None


def test_it_creates_no_more_than_the_limit_and_works_on_the_gpu_of_its_backing(cuda):
    with PooledBacking(CudaDriver(2, api=cuda), [16], G, limit=8) as backing:
        backing.map([Run(0, 0, 4)])
        create, where = cuda._cuMemCreate, []
        cuda._cuMemCreate = lambda *args: where.append(cuda.current()) or create(*args)
        prefaulter = Prefaulter(backing, pooled=6)
        prefaulter.start()
        prefaulter.wait()
        assert where == [2] * 4
        assert (backing.at_hand, backing.committed_bytes) == (4, 8 * G)
        prefaulter.stop()
        backing.map([Run(0, 4, 4)])
        backing.check()
        assert backing.committed_bytes == 8 * G


def test_a_machine_out_of_memory_is_reported_and_tried_again(cuda, caplog):
    with PooledBacking(CudaDriver(0, api=cuda), [16], G, limit=16) as backing:
        cuda.fail["cuMemCreate"] = [cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY]
        with Prefaulter(backing, pooled=4) as prefaulter:
            prefaulter.wait()
            assert isinstance(prefaulter.error, PoolExhausted)
            assert caplog.text.count("no memory can be made ahead of need") == 1
            assert backing.committed_bytes == G
            prefaulter.wake()
            prefaulter.wait()
            assert prefaulter.error is None
        assert backing.committed_bytes == 4 * G
        backing.check()


class Held:
    """A backing whose prefaults wait to be let go once `asked` is set, and count when they go on."""

    on_taken, at_hand, prefaults = None, 0, 0
    driver = SimpleNamespace(bind=lambda: None)

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def prefault(self, count: int) -> None:
        if self.asked.is_set():
            self.go.wait()
        self.prefaults += 1


@pytest.mark.parametrize("line", range(16))
def test_a_wake_that_comes_before_any_line_of_the_thread_is_served(line: int):
    """`wait` returns when a prefault has begun after the last wake, wherever the thread was when that came."""
    backing, lines, before = Held(), count(), []
    prefaulter = Prefaulter(backing, pooled=1)  # type: ignore[arg-type]

    def step(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not Prefaulter._run.__code__:
            return None
        if event == "line" and next(lines) == line:
            before.append(backing.prefaults)
            backing.asked.set()
            prefaulter.wake()
        return step

    threading.settrace(step)
    try:
        prefaulter.start()
        while not backing.asked.wait(0.05):
            prefaulter.wake()  # another round, until the line comes
        waiting = threading.Thread(target=prefaulter.wait)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive() or backing.prefaults > before[0], "the last wake was forgotten"
        backing.go.set()
        waiting.join()
        assert backing.prefaults > before[0]
    finally:
        backing.go.set()
        threading.settrace(None)  # type: ignore[arg-type]
        prefaulter.stop()
