"""The stand-in for a GPU, and a driver that fails on order."""

import pytest

from sglang_hybrid.core.errors import PoolExhausted
from tests.fake_cuda import FakeCuda


class Failing:
    """A driver in front of another that fails the n-th call of a method, once."""

    def __init__(self, inner):
        self.inner = inner
        self.plan = {}

    def fail(self, method, after, error=None):
        self.plan[method] = (after, error or PoolExhausted(f"injected into {method}: 0"))

    def __getattr__(self, name):
        target = getattr(self.inner, name)
        if name not in self.plan:
            return target

        def call(*args):
            if name in self.plan:
                after, error = self.plan[name]
                if after == 0:
                    del self.plan[name]
                    raise error
                self.plan[name] = (after - 1, error)
            return target(*args)

        return call


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def make_cuda():
    return FakeCuda


@pytest.fixture
def failing():
    return Failing
