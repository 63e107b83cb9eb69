"""Has SGLang's own logger write two requests at each level: run as a script, with a folder for each as arguments.

A process of its own, as importing SGLang patches transformers; what it writes to stdout is a server's stdout.
"""

from __future__ import annotations

import os
import sys

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang_hybrid.engine.cpu import vision

vision.install()  # before SGLang: its imports need it
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
from sglang.srt.utils.request_logger import RequestLogger  # noqa: E402

full = RequestLogger(True, 3, "json", ["stdout", sys.argv[1]])
lower = RequestLogger(True, 1, "json", [sys.argv[2]])
asked = [
    GenerateReqInput(
        rid="first",
        input_ids=[11, 12, 13, 14],
        sampling_params={"max_new_tokens": 2, "custom_params": {"cache_boundaries": [3]}},
    ),
    GenerateReqInput(rid="second", text="hello there", extra_key="tenant"),
]
for number, request in enumerate(asked):
    print("INFO: 127.0.0.1:5 - POST /generate", file=sys.stderr if number else sys.stdout, flush=True)
    meta = {"id": request.rid, "prompt_tokens": 4, "completion_tokens": 2, "e2e_latency": 0.25, "finish_reason": None}
    for logger in (full, lower):
        logger.log_received_request(request)
        logger.log_finished_request(request, {"text": "so it is", "output_ids": [15, 16], "meta_info": meta})
