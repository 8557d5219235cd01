"""Benchmarks whose numbers are read off compiled programs: they are the same every time, and so are met or not."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments):
    command = [sys.executable, "-W", "error", ROOT / "benchmarks" / "run.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_memory_and_planning():
    finished = run("memory", "plan_operations", "--json")
    assert finished.returncode == 0, finished.stderr
    results = json.loads(finished.stdout)
    measures = {measure["name"]: measure for measure in results["measures"]}
    assert len(measures) == 5 and not results["left_out"]
    assert all(measure["met"] for name, measure in measures.items() if name.startswith("memory"))
    assert measures["plan_operations, all"]["value"] <= 100  # 84 with jax 0.10.2


def test_an_unknown_name():
    finished = run("memory", "speed")
    assert finished.returncode == 2 and "no benchmark speed" in finished.stderr
