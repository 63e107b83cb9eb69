"""MambaRadixCache: SGLang's unified radix cache with the decisions of `prefix/`.

| what SGLang does                          | what stands in its place                    | where                     |
|-------------------------------------------|---------------------------------------------|---------------------------|
| one state per prefill, branch *or* tail   | branch, boundaries and tail of one prefill  | driver.py, forward.py     |
| states and KV leave by two orders of age  | by one score, O(log n) a victim             | victims.py, components.py |
| memory is freed victim by victim          | in one step, a little ahead                 | tree_core.py              |
| an assertion where states run out         | no checkpoint, a miss, a later admission    | components.py, hooks.py   |
| HiCache's host tier ages                  | by the same score; no restore without slots | ../hicache                |
| a miss is a number                        | a miss has a reason                         | metrics.py                |

The tree decides, the cache executes: `prefix.decisions.Decisions` is pure, `driver.Driver` asks it and applies what it
says, `build.build` assembles both into a `radix_cache.MambaRadixCache`. The components are SGLang's own, subclassed:
HiCache, sessions and paging stay SGLang's.
"""
