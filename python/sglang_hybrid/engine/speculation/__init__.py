"""Speculative decoding with recurrent layers: what SGLang gets wrong.

| what SGLang does                                           | what stands in its place                   | where     |
|------------------------------------------------------------|--------------------------------------------|-----------|
| starts with settings under which answers go wrong          | the launcher refuses them                  | checks.py |
| counts a run that a grammar cut as if it was whole         | it counts what is left (0.5.23 does, too)  | guards.py |
| files a slot that the cut tail wrote to                    | nothing is filed                           | guards.py |
| files a state that is longer than its key                  | nothing is filed                           | guards.py |
| lets requests that ended write to slots the cache may own  | they have none (0.5.23 does, too)          | guards.py |
| ends an answer at any of several ends in a run             | it ends at the first                       | stops.py  |
| prefills a head in a CUDA graph that drops what it is fed  | the head's prefill runs outside one        | heads.py  |

`algorithms.py` refuses what SGLang has no code for here, `drafts.py` looks at what drafts: flags, files, and whether a
CPU can run it.
"""
