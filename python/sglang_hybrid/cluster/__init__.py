"""Several servers behind one address.

| question                                                  | where        |
|-----------------------------------------------------------|--------------|
| what a worker is, what it has to do, whether it is well   | workers.py   |
| what a worker holds, from its channel of events           | channel.py   |
| which pages the prompt of a request has                   | prompts.py   |
| which worker gets a request, and what becomes of it       | router.py    |
| the same for a pair of them, prompt here, answer there    | pairs.py     |
| which servers can be a pair                               | peers.py     |
| what a request of a pair says besides, which cannot be one| handover.py  |
| the router's numbers, and what `doctor --url` makes of them| numbers.py, status.py |
| `sglang-hybrid route`: a router before servers that run   | route.py     |
| `sglang-hybrid cluster`: servers and a router, one command| local.py     |

Which worker is best for a prompt is decided in `sglang_hybrid.routing`, where the simulator asks as well.
"""
