"""The processes of a server, or of an engine in somebody's own: how they begin, are watched, and end.

| question                                            | where         |
|-----------------------------------------------------|---------------|
| what do SIGTERM, a closed terminal and a crash do   | stop.py       |
| how do children begin                               | children.py   |
| who watches replicas of one server                  | replicas.py   |
| which files go when a server ends                   | leftovers.py  |
| what becomes of an engine in somebody's own process | embedded.py   |
| what does Ctrl-C do in one of its calls             | interrupts.py |

What waits for requests to end is `frontend/server/drain.py`.
"""
