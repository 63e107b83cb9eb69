"""What runs before SGLang starts, in the launcher: bad input ends here, with exit status 2.

| question                                             | where                      |
|------------------------------------------------------|----------------------------|
| which steps lead to SGLang's start                   | preparation.py             |
| which words of the command line are ours             | flags.py                   |
| a GPU or a CPU                                       | platform.py                |
| what of it can be said before SGLang's imports       | early.py                   |
| does somebody listen on the port, or start on it     | port.py                    |
| can this model start here                            | models.py                  |
| can these files and sizes be had                     | settings.py                |
| is the model folder whole                            | folder.py                  |
| which arguments does SGLang get                      | arguments.py               |
| which defaults suit a plain CPU                      | cpu_profile.py             |
| which environment variables does a start set         | environment.py             |
| how many state slots does a request take             | slots.py                   |
| who chooses how states are cached if SGLang does not | unsettled.py               |
| may a prefill be captured as a CUDA graph            | graphs.py                  |
| which arguments would SGLang end on, or answer wrong | refusals/                  |
| what do pairs and the server in Rust need            | disaggregation.py, rust.py |
| what does the operating system let a server have     | limits.py, writable.py     |
| which model is it, whatever it is called             | fingerprint.py             |
| which server is it, at this start                    | server_name.py             |

How its processes begin, are watched and end is in ../processes; what is wrong with an environment, in ../doctor.
"""
