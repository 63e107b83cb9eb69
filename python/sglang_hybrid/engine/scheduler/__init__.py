"""What SGLang's scheduler would end on, or keep for ever, of what clients and administrators ask; beside its cache.

| what SGLang does                                      | what stands in its place               | where         |
|-------------------------------------------------------|----------------------------------------|---------------|
| an id that begins another's id aborts it              | it aborts its own request              | ids.py        |
| a logit processor that fails ends the scheduler       | it ends its request, with 400          | processors.py |
| beams of a hybrid go on from states of others         | 400                                    | beams.py      |
| every compiled grammar is kept                        | as many as a few megabytes of text     | grammars.py   |
| weights change under a request whose client hung up   | the update waits until nobody runs     | idle.py       |
| an update that flushes in a pause ends the scheduler  | 400 if requests have begun             | idle.py       |
| so does resuming what was never released              | it needs no resuming                   | released.py   |
| so does a request while memory is released            | 503, with what brings it back          | released.py   |
| so do weights that cannot be loaded                   | 400; ranks agree, a folder rolls back  | mistakes.py   |
| so does a trace that cannot be written                | the trace alone is lost                | profiles.py   |
| of N replicas one has what a request goes on from     | it goes to that one                    | dispatch.py   |
| the server in Rust has no HTTP process of ours        | the scheduler checks its requests      | rust.py       |

`dispatch.py` acts in the controller of data-parallel replicas, which stands before their schedulers. What requests may
ask at all is refused earlier, in the HTTP process (../frontend). `engine/surface/scheduler.py` registers all of it.
"""
