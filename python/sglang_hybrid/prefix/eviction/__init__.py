"""Who leaves: orders of eviction over candidates, each a score or an index.

| what                                             | where            |
|--------------------------------------------------|------------------|
| a candidate, and what an order of them must do   | candidates.py    |
| least recently used                              | lru.py           |
| greedy dual size frequency                       | gdsf.py          |
| Marconi: recency and FLOP efficiency             | marconi.py       |
| the weight between these two, learned            | tuner.py         |
| expected savings, by what is learned of reuse    | forecast.py      |
| the lowest of a sample, as its scores change all | sampled_index.py |
"""
