"""The platform in a real SGLang process: stand-ins and hooks are in place, SGLang's names lead to our kernels."""

import json
import os
import subprocess
import sys

import pytest

from sglang_hybrid.core.config import ENVIRONMENT_KEY
from sglang_hybrid.engine import compat

HOOKED = {"0.5.17": 25, "0.5.21": 40, "0.5.23": 38}  # 0.5.22 adds Granite's residual once, 0.5.23 asks for no stream

PROBE = """
import json, sys
from sglang_hybrid.engine import cpu
first, second = cpu.install(), cpu.install()
import sgl_kernel, torch
try:
    import sgl_kernel.scalar_type
    absent = False
except ImportError:
    absent = True
from sglang.srt.plugins.hook_registry import HookRegistry
targets = cpu.register_hooks()
HookRegistry.apply_hooks()
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.mamba import mamba, mixer2_rms_norm_gated
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.srt.speculative import eagle_utils
import sglang.srt.models.qwen3_5, sglang.srt.models.qwen3_next
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang_hybrid.engine.cpu import pinning

def origin(function):
    while hasattr(function, "__wrapped__") and not function.__module__.startswith("sglang_hybrid"):
        inner = [c.cell_contents for c in function.__closure__ or () if callable(c.cell_contents)]
        ours = [f for f in inner if f.__module__.startswith("sglang_hybrid")]
        function = ours[0] if ours else function.__wrapped__
    return function.__module__.rpartition(".")[2] + "." + function.__name__

from sglang.srt.models import granitemoehybrid
from sglang_hybrid.engine.cpu import granite
wrapped = granitemoehybrid.GraniteMoeHybridMambaDecoderLayer.forward
hidden, residual = granite.drop_added_residual((torch.ones(2), torch.full((2,), 5.0)), "self", residual=1)
granite_result = [hasattr(wrapped, "__wrapped__"), hidden.tolist(), residual.tolist()]
x = torch.ones(2, 4)
gate = torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, torch.zeros(2, 4))
pool = torch.zeros(3, 8, dtype=torch.int32)
sgl_kernel.assign_req_to_token_pool_cpu(
    torch.tensor([2, 0]), pool, torch.tensor([1, 0]), torch.tensor([3, 2]), torch.tensor([5, 6, 7, 8]), 8
)
try:
    sgl_kernel.rotate_input_ids_cpu()
    loud = ""
except NotImplementedError as error:
    loud = str(error)
print(json.dumps({
    "active": [first, second], "absent": absent, "targets": targets, "loud": loud,
    "missing": [target for target in targets if target not in HookRegistry._patched],
    "origins": {name: origin(function) for name, function in {
        "chunk": gdn_triton.chunk_gated_delta_rule, "conv": gdn_backend.causal_conv1d_fn,
        "mixer conv": mamba.causal_conv1d_fn, "mixer conv triton": mamba.causal_conv1d_fn_triton,
        "mixer update": mamba.causal_conv1d_update, "mixer update triton": mamba.causal_conv1d_update_triton,
        "scan": mamba.mamba_chunk_scan_combined, "ssu": mamba.selective_state_update,
        "norm": mixer2_rms_norm_gated.rms_norm_gated, "track": hybrid.track_mamba_states_if_needed,
        "track all": hybrid.track_mamba_states_all_layers, "decode": ScheduleBatch.prepare_for_decode,
    }.items()},
    "granite": granite_result,
    "draws": [
        {**vars(sgl_kernel), **vars(eagle_utils)}[name].__module__
        for name in ("top_k_renorm_prob", "top_p_renorm_prob", "tree_speculative_sampling_target_only")
    ],
    "halved": x.tolist() == [[0.5] * 4] * 2 and gate.data_ptr() == x.data_ptr(), "pool": pool.tolist(),
}))
"""


@pytest.fixture(scope="module")
def report():
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_install_is_idempotent(report):
    assert report["active"] == [True, True]


def test_every_hook_took(report):
    assert report["missing"] == []
    hooked = len(report["targets"])
    assert len(set(report["targets"])) == hooked == HOOKED.get(compat.engine_version(), hooked)


def test_names_in_sglang_lead_here(report):
    assert report["origins"] == {
        "chunk": "gdn.chunk_gated_delta_rule",
        "conv": "causal_conv.causal_conv1d_fn",
        "mixer conv": "causal_conv.causal_conv1d_fn",
        "mixer conv triton": "causal_conv.causal_conv1d_fn",
        "mixer update": "causal_conv.causal_conv1d_update",
        "mixer update triton": "causal_conv.causal_conv1d_update",
        "scan": "mamba2.mamba_chunk_scan_combined",
        "ssu": "mamba2.selective_state_update",
        "norm": "norm.rms_norm_gated",
        "track": "checkpoint.track_states",
        "track all": "checkpoint.track_states_all_layers",
        "decode": "pinning.without_pinning",
    }


def test_a_verification_draws_with_our_functions(report):
    assert report["draws"] == ["sglang_hybrid.engine.cpu.speculation.sampling"] * 3


def test_the_stand_in_has_only_what_the_cpu_path_needs(report):
    assert report["absent"]
    assert "no sgl_kernel.rotate_input_ids_cpu" in report["loud"]


def test_registered_operators_run(report):
    assert report["halved"]


def test_new_slots_are_written_into_each_requests_row(report):
    assert report["pool"] == [[7, 8, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 5, 6, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "inherited", [None, pytest.param("{}", marks=pytest.mark.slow), pytest.param("no JSON", marks=pytest.mark.slow)]
)
def test_a_server_that_sglang_launches_keeps_its_own_functions(inherited):
    """Nor does it take a variable for its launcher's that was there before it."""
    probe = (
        "import json, os; from sglang_hybrid.engine import backend; from sglang_hybrid.engine.surface import hooks\n"
        "from sglang_hybrid.core.config import HybridConfig; from sglang_hybrid.engine.launch import preparation\n"
        "from sglang.srt.plugins import load_plugins; from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from sglang_hybrid.engine.surface.rows import full_name\n"
        "load_plugins()\n"
        "for_cpu = {full_name(row.target).replace(':', '.') for row in hooks.HOOKS if row.when == 'cpu'}\n"
        "try: backend.build_cache(None)\n"
        "except Exception as error: refused = str(error)\n"
        "patched, handed_on = set(HookRegistry._patched), HybridConfig.in_environment()\n"
        "try: preparation.enter([], HybridConfig(), None)\n"
        "except Exception as error: later = str(error)\n"
        "print(json.dumps([len(patched & for_cpu), sorted(patched - for_cpu), handed_on, refused, later]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT_KEY}
    environment |= {} if inherited is None else {ENVIRONMENT_KEY: inherited}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, timeout=1800, check=True
    )
    for_cpu, others, handed_on, refused, later = json.loads(done.stdout.splitlines()[-1])
    assert for_cpu > 0
    assert others == []
    assert not handed_on
    assert "sglang-hybrid serve" in refused
    assert "start sglang_hybrid.Engine first" in later


def test_nothing_is_hooked_where_nothing_was_installed():
    probe = (
        "import sys, torch; torch.cuda.is_available = lambda: True\n"
        "from sglang_hybrid.engine import cpu\n"
        "print(cpu.install(), cpu.register_hooks(), 'sgl_kernel' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=1800, check=True)
    assert done.stdout.split() == ["False", "[]", "False"]


def test_granites_last_residual_is_added_once(report):
    ours = tuple(map(int, compat.engine_version().split(".")[:3])) < (0, 5, 22)
    assert report["granite"] == [ours, [1.0, 1.0], [0.0, 0.0]]
