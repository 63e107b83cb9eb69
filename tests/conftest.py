"""Generated examples are the same in every run, whatever the machine; `--hypothesis-profile=explore` draws new ones."""

from hypothesis import settings

settings.register_profile("repeat", derandomize=True)
settings.register_profile("explore")
settings.load_profile("repeat")
