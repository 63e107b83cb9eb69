"""The kinds of failure: who must act decides the class, the message names the remedy and ends with the value."""


class HybridError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(HybridError, ValueError):
    """The user must fix a setting, a file or an input; retrying the same call fails again."""


class IncompatibleEngine(ConfigError):
    """The installed SGLang is outside the supported range or lacks a door this package needs."""


class PoolExhausted(HybridError):
    """A pool is full right now; the caller degrades (skips a checkpoint, evicts, retracts) and goes on."""


class EngineDied(HybridError, RuntimeError):
    """An engine of this process is no more, nor what was asked of it; another one can be made."""


class InvariantError(HybridError, AssertionError):
    """A bug of this package: an internal structure contradicts itself or was used against its contract."""
