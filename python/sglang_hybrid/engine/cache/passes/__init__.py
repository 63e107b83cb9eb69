"""The states that a forward pass leaves beside the one that SGLang saves, for each kind of recurrent layer.

| what                                                         | where              |
|--------------------------------------------------------------|--------------------|
| which states a prefill of the served model can give back     | prefill_states.py  |
| several states of one prefill: delta rules, Mamba-2          | forward.py         |
| windows of a convolution alone: LFM2                         | windows.py         |
| what Qwen4-Exp keeps beside its states                       | ngrams.py          |
| states inside a chunk, copies between slots                  | kernels.py         |
| few numbers of windows for SGLang's Triton convolution       | convolution.py     |
| no CUDA graph of a prefill that keeps freed index sets       | captured.py        |
"""
