"""What `simulate` can be asked about segments: its flags, the rows they add, and what it says of a trace."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.segments import STATE_DTYPES
from sglang_hybrid.prefix.policies import DEFAULT
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.sim.segments.cache import Memory
from sglang_hybrid.sim.trace import Trace

SUFFIX = "+segments"
"""`forecast+segments` is that policy with a part of the capacity for segments."""


def add_flags(add: Callable[..., Any]) -> None:
    """Add the flags by `add`, an ArgumentParser's add_argument."""
    shown = "as --hybrid-segment-dtype of a server (default: %(default)s)"
    add(
        "--segments-gb",
        type=float,
        metavar="GB",
        help="keep what requests mark as segments in so much of each capacity",
    )
    add("--segment-dtype", choices=tuple(STATE_DTYPES), default="bfloat16", help=f"of states of segments, {shown}")
    add("--seam-tokens", type=int, default=8, help="computed with every use, at each end of a segment (default: 8)")
    add(
        "--pass-tokens", type=int, default=8192, metavar="N",
        help="of a prefill pass, as --chunked-prefill-size; a longer segment is not kept (default: 8192)",
    )  # fmt: skip
    add(
        "--transitions-kept", type=float, default=1.0, metavar="SHARE",
        help="heads that do not forget within a segment what was before it; others keep no transition (default: 1)",
    )  # fmt: skip


def memory(args: argparse.Namespace) -> Memory | None:
    """The memory that was asked for, None for none; raises ConfigError for numbers that are none."""
    if args.segments_gb is None:
        return None
    if not math.isfinite(args.segments_gb) or args.segments_gb <= 0:
        raise ConfigError(f"--segments-gb must be a positive number of GB: {args.segments_gb:g}")
    if args.pass_tokens < 1:
        raise ConfigError(f"--pass-tokens must be positive: {args.pass_tokens}")
    if not 0 <= args.transitions_kept <= 1:
        raise ConfigError(f"--transitions-kept is a share between 0 and 1: {args.transitions_kept:g}")
    seams, total = Seams(args.seam_tokens, 0), round(args.segments_gb * 1e9)
    return Memory(total, args.segment_dtype, seams.width, args.pass_tokens, args.transitions_kept)


def rows(policies: Sequence[str], ceilings: bool, memory: Memory | None) -> list[str]:
    """`policies` with the rows of segments, of the default policy if it is among them, else of the last one.

    Raises ConfigError for a row of segments that have no memory.
    """
    named = [policy for policy in policies if policy.endswith(SUFFIX)]
    if memory is None:
        if named:
            raise ConfigError(f"say how much memory segments have, add --segments-gb: {named[0]}")
        return list(policies)
    base = DEFAULT if DEFAULT in policies else policies[-1]
    added = [] if named else [base + SUFFIX]
    return [*policies, *added, *(["clairvoyant" + SUFFIX, "unbounded" + SUFFIX] if ceilings else [])]


def notes(trace: Trace, memory: Memory | None, capacities_gb: Sequence[float]) -> list[str]:
    """Sentences about the segments of `trace`; raises ConfigError where no capacity has room for them."""
    marking = sum(bool(request.segments) for request in trace.requests)
    if memory is None:
        said = f"{marking:,} of {len(trace):,} requests mark segments; --segments-gb 4 simulates keeping them"
        return [said] if marking else []
    if not marking:
        return ["no request marks a segment, so rows of segments are left out"]
    small = [gb for gb in capacities_gb if gb * 1e9 <= memory.total_bytes]
    if len(small) == len(capacities_gb):
        raise ConfigError(
            f"segments take their memory from --capacity-gb, give more than: {memory.total_bytes / 1e9:g}"
        )
    return [f"at {gb:g} GB there is no room for {memory.total_bytes / 1e9:g} GB of segments" for gb in small]
