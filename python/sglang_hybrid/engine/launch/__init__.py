"""What runs before SGLang starts, in the launcher: bad input ends here, with exit status 2.

| question                                       | where          |
|------------------------------------------------|----------------|
| which words of the command line are ours       | flags.py       |
| a GPU or a CPU                                 | platform.py    |
| can this model start here: folder, port, sizes | preflight.py   |
| is the model folder whole                      | folder.py      |
| what of it can be said before SGLang's imports | early.py       |
| which arguments does SGLang get                | arguments.py   |
| which defaults suit a plain CPU                | cpu_profile.py |
| how many state slots does a request take       | slots.py       |
| which environment variables does a start set   | environment.py |
| may a prefill be captured as a CUDA graph      | graphs.py      |
| what do SIGTERM and Ctrl-C do                  | stop.py        |
| which files go when a server ends              | leftovers.py   |
| what is wrong with this environment            | doctor.py      |
| what does a running server say of its cache    | status.py      |
| which packages import, and how to mend others  | packages.py    |
"""
