"""Generated examples are the same in every run, whatever the machine; `--hypothesis-profile=explore` draws new ones."""

from hypothesis import HealthCheck, settings

_LOADED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no failure
settings.register_profile("repeat", derandomize=True, **_LOADED)
settings.register_profile("explore", **_LOADED)
settings.load_profile("repeat")
