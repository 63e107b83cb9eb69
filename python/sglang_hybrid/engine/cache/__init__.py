"""MambaRadixCache: SGLang's unified radix cache with the decisions of `prefix/`.

| what SGLang does                         | what stands in its place                    | where                      |
|------------------------------------------|---------------------------------------------|----------------------------|
| one state per prefill, branch *or* tail  | branch, boundaries and tail of one prefill  | coordinator.py, passes/    |
| states and KV leave by two orders of age | by one score, a sample of 1,024 at most     | victims.py, components.py  |
| memory is freed victim by victim         | in one step, a little ahead                 | tree_core.py               |
| an assertion where states run out        | no checkpoint, a miss, a later admission    | memory.py, components.py   |
| HiCache's host tier ages                 | by the same score; no restore without slots | ../hicache                 |
| a prefill's graph keeps freed index sets | no graph of such a prefill                  | passes/captured.py         |
| a miss is a number                       | a miss has a reason                         | coordinator.py, metrics.py |

The tree decides, the cache executes: `prefix.decisions.Decisions` is pure, `coordinator.CacheCoordinator` asks it and
applies what it says, `memory.Memory` gets what that takes: `StaticMemory` here, `ElasticMemory` in ../pools.
`build.build` puts them together in one order, and the `radix_cache.MambaRadixCache` around them. The components are
SGLang's own, subclassed: HiCache, sessions and paging stay SGLang's.
"""
