"""The HTTP processes themselves: how they begin, know each other, and end when they are told to.

| what SGLang does                                     | what stands in its place              | where       |
|------------------------------------------------------|---------------------------------------|-------------|
| HTTP workers load no plugin                          | they prove every hook or do not serve | workers.py  |
| one of them knows of new weights                     | all do                                | identity.py |
| a call from a second event loop waits for ever       | it raises                             | loop.py     |
| threads do not know whose request they work for      | they do                               | executor.py |
| a path has the prefix that a proxy stripped          | it is that of its route               | paths.py    |
| a stop in a pause waits for requests that cannot end | the pause ends first                  | drain.py    |
| so does one before the first request, for minutes    | it waits no more once it is closed    | drain.py    |
| so does a pause that aborts those of another pause   | they are retracted first              | drain.py    |
| routers send more to a server that is told to stop   | they are told, and it ends            | looks.py    |
"""
