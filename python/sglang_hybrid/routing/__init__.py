"""Which of several servers gets a request: what each of them holds (index.py) and which one to take (policies.py).

Pure: the same classes serve the router's process (`sglang_hybrid.cluster`) and the simulator.
"""
