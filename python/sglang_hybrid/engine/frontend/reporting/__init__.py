"""What clients and monitoring are told.

| what SGLang does                                        | what stands in its place       | where      |
|---------------------------------------------------------|--------------------------------|------------|
| usage counts cached tokens                              | and says why the others missed | usage.py   |
| a label that metrics lack ends the HTTP process         | it is left out                 | labels.py  |
| each priority that ever came is written with each batch | the first 64 are               | labels.py  |
| names of series depend on who asks for `/metrics`       | they do not                    | scrapes.py |

`labels.py` acts in the scheduler too.
"""
