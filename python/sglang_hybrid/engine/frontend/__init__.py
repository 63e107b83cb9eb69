"""What stands between clients and the engine, in SGLang's first process or each of its HTTP workers.

| what SGLang does                                        | what stands in its place               | where            |
|---------------------------------------------------------|----------------------------------------|------------------|
| HTTP workers load no plugin                             | they prove every hook or do not serve  | workers.py       |
| a number, type or size out of range ends the scheduler  | 400, with the remedy                   | arrival.py       |
| token ids outside the vocabulary do too                 | 400, once the prompt is tokens         | prompt.py        |
| sampling parameters pass unseen                         | they have SGLang's types, and bounds   | sampling.py      |
| a stop pattern may backtrack for ever                   | its steps are counted, its tail ends   | stop_patterns.py |
| streams of several samples leave states behind          | nothing is left when they are over     | requests.py      |
| a call from a second event loop waits for ever          | it raises                              | loop.py          |
| a stop in a pause waits for requests that cannot end    | the pause ends first                   | drain.py         |
| so does one before the first request, for minutes       | it waits no more once it is closed     | drain.py         |
| so does a pause that aborts those of another pause      | they are retracted first               | drain.py         |
| routers send more to a server that is told to stop      | they are told, and it ends             | looks.py         |
| a body has any length                                   | 413 beyond a limit                     | bodies.py        |
| mistakes of clients are 500s at some endpoints          | 400, in the form of the endpoint       | endpoints.py     |
| a level of logs that there is not fails every request   | 400; nothing is changed                | endpoints.py     |
| a profile that cannot be made ends the scheduler        | 400                                    | profiles.py      |
| a label that metrics lack ends the HTTP process         | it is left out                         | labels.py        |
| each priority that ever came is written with each batch | the first 64 are                       | labels.py        |
| `/server_info` shows the API keys                       | it does not                            | access.py        |
| usage counts cached tokens                              | and says why the others missed         | usage.py         |
| `document` blocks and marks of segments are unknown     | text, and token ranges of the prompt   | segments/        |

`labels.py` acts in the scheduler too; what else has to be checked there is in ../scheduler.
`engine/surface/hooks.py` registers all of it, `limits.py` holds the bounds; docs/security.md lists them.
"""
