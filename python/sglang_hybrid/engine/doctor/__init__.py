"""`sglang-hybrid doctor`: what is wrong, and what to do about it.

| question                                      | where           |
|-----------------------------------------------|-----------------|
| what is wrong with this environment           | installation.py |
| which packages import, and how to mend others | packages.py     |
| what does a running server say of its cache   | status.py       |

What it says of its elastic memory is read in `pools/remote.py`.
"""
