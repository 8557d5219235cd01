"""The README's code runs, and CI runs the README's test command."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[int, str]]:
    """The fenced blocks in `language`: the number of lines before each, and its text."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, block.start(1)), block.group(1)) for block in found]


def test_python_blocks_run_in_order():
    assert blocks("python")
    namespace = {"__name__": "readme"}
    for lines_before, code in blocks("python"):
        # Blank lines in front, so that a traceback names the README's own lines.
        exec(compile("\n" * lines_before + code, "README.md", "exec"), namespace)


def test_two_commands_do_everything_and_ci_runs_the_second():
    [(_, commands)] = blocks("bash")
    main_job, tests = [line.split("#")[0].strip() for line in commands.splitlines()]
    for command in (main_job, tests):
        assert (ROOT / command.removeprefix("bash ")).is_file()
    assert tests in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
