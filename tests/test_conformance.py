"""The recorded traces replay without a divergence, and the runner notices when they do not."""

import gzip
import json

import pytest

from tests.conformance import IMPLEMENTATIONS, main, run_file, vendored

FILES = list(vendored())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_traces_replay(path, implementation):
    report = run_file(path, implementation)
    assert report.operations > 0 and report.values > 0
    assert not report.divergences, str(report)


def test_a_falsified_trace_diverges(tmp_path, capsys):
    with gzip.open(FILES[0], "rt") as file:
        recorded = json.load(file)
    recorded["traces"] = recorded["traces"][:1]
    forward = next(op for op in recorded["traces"][0]["ops"] if op["op"] == "forward")
    layer = next(iter(forward["result"]["visible"]))
    forward["result"]["visible"][layer][0][0][1] += 1
    falsified = tmp_path / "falsified.json"
    falsified.write_text(json.dumps(recorded))
    assert main([str(falsified), "--implementation", "reference"]) == 1
    assert "1 divergence" in capsys.readouterr().out
