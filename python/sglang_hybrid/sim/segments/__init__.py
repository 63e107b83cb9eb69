"""What segments would bring: traces that mark them, through the decisions of a server that reuses them.

| what                                                              | where     |
|-------------------------------------------------------------------|-----------|
| a prefix cache with memory for segments beside it                 | cache.py  |
| orders of eviction to compare with: recency, and one that knows   | orders.py |
| a trace through such a cache, and the columns of its row          | play.py   |
| the answer in words                                               | words.py  |
"""
