"""What the cache costs beside plain arrays: `python benchmarks/run.py [NAME...] [--json] [--plots DIR]`.

Ratios are of two things timed in turn in one run, compiled before, so that they hold on a noisy machine; each is the
median of many. Without names, all benchmarks run; `--plots` draws what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # tests
import bench_models
import bench_planning
import bench_reference
import bench_states
import bench_versus
from measure import Measure, Unavailable

BENCHMARKS: dict[str, Callable[[], list[Measure]]] = {
    "decode_state": bench_states.decode_state,
    "decode_floor": bench_states.decode_floor,
    "decode_trivial": bench_states.decode_trivial,
    "memory": bench_states.memory,
    "decode_model": bench_models.decode_model,
    "fork": bench_planning.fork,
    "restore": bench_planning.restore,
    "remove": bench_planning.remove,
    "capture": bench_planning.capture,
    "plan_scale": bench_planning.plan_scale,
    "plan_operations": bench_planning.plan_operations,
    "prefill": bench_models.prefill,
    "versus": bench_versus.versus,
    "reference": bench_reference.reference,
}


def machine() -> str:
    """What this ran on."""
    devices = jax.devices()
    return (
        f"{processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, jax {jax.__version__}, "
        f"{len(devices)} x {devices[0].device_kind}"
    )


def processor() -> str:
    """Its architecture, and on Linux its name and how wide its vectors are: libraries have code for each width."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    vectors = [name for name in ("avx512f", "avx2") if name in known.get("flags", "").split()]
    return ", ".join([platform.machine(), *filter(None, [known.get("model name")]), *vectors[:1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots of what was measured, and results.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(BENCHMARKS)}")
    if arguments.plots:
        try:  # before all is measured
            import plots
        except ImportError as error:
            parser.error(f"--plots: {error}: pip install -e '.[bench]'")
    measures, left_out = [], {}
    for name in arguments.names or BENCHMARKS:
        try:
            found = BENCHMARKS[name]()
        except Unavailable as error:
            left_out[name] = str(error)
            if not arguments.json:
                print(f"{name}: left out: {error}", flush=True)
            continue
        measures += found
        if not arguments.json:
            print(*found, sep="\n", flush=True)
    results = {
        "machine": machine(),
        "measures": [dataclasses.asdict(measure) | {"met": measure.met} for measure in measures],
        "left_out": left_out,
    }
    print(json.dumps(results) if arguments.json else results["machine"])
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        (arguments.plots / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        plots.draw(measures, arguments.plots)


if __name__ == "__main__":
    main()
