"""Servers of prefill/decode pairs (docs/pd.md), in their schedulers.

| what SGLang does                                         | what stands in its place                | where          |
|----------------------------------------------------------|-----------------------------------------|----------------|
| hands over how many tokens were cached                   | and why the others were not             | misses.py      |
| a server that decodes reuses KV only where it has states | where it has KV: states are handed over | kv_cache.py    |
| checksums of what is handed over need CUDA               | on a CPU too                            | checksums.py   |
| requests and servers that do not fit end its schedulers  | the request is refused, or fails        | guards.py      |
| takes a server that was started again for the old one    | it is met anew                          | connections.py |
| copies numbers of pages to pinned memory                 | on a CPU they are there                 | indices.py     |
| NIXL is told that states are in a GPU's memory           | on a CPU, that they are in the host's   | nixl.py        |

What they need before they start is in `launch/disaggregation.py`.
"""
