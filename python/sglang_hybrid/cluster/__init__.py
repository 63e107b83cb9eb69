"""Several servers behind one address.

| question                                                  | where        |
|-----------------------------------------------------------|--------------|
| what a worker is, and has to do                           | worker.py    |
| which workers are well, and why one is not                | workers.py, failures.py |
| what a worker holds, from its channel of events           | channel.py   |
| which pages the prompt of a request has                   | prompts.py   |
| which of them begin with the same image                   | media.py     |
| which worker gets a request                               | router.py    |
| what becomes of its answer                                | answers.py   |
| the same for a pair of them, prompt here, answer there    | pairs.py     |
| which servers can be a pair                               | peers.py     |
| what a request of a pair says besides, which cannot be one| handover.py  |
| what is logged of mistakes of clients                     | mistakes.py  |
| the router's numbers, and what `doctor --url` makes of them| numbers.py, status.py |
| `sglang-hybrid route`: a router before servers that run   | route.py     |
| `sglang-hybrid cluster`: servers and a router, one command| local.py     |

Which worker is best for a prompt is decided in `sglang_hybrid.routing`, where the simulator asks as well.
"""
