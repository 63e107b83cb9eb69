"""Elastic memory: SGLang's KV and state pools over one budget of granules (`--hybrid-memory elastic`).

| what SGLang does | what stands in its place | where |
|---|---|---|
| two pools of fixed sizes, a ratio to guess | addresses for all of the budget, memory on demand | sizes.py, arena.py |
| tensors made once | tensors over reserved addresses | states.py, kv.py |
| free lists over all slots | pages drawn from columns when they are needed | supply.py, allocators.py |
| a pool is full, the other is not | the least valuable bytes go, of any kind, segments too | memory.py |
| out of memory is an assertion | reserved before it is admitted, else it waits | memory.py, hooks.py |
| memory is kept for life | given back when idle, or on request | arena.py, hooks.py |

`memory/` decides and counts, `device/` maps, this package is what SGLang sees. What cannot work is refused at start
(refusals.py).
"""
