"""Continuing prompts from the command line."""

import json
import shutil
from pathlib import Path

import pytest

import generate

LFM2 = Path(__file__).parent / "data" / "hf" / "lfm2"


def run(capsys, *prompts, folder=LFM2, seed=0):
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    generate.main(["--model", str(folder), "--max-new-tokens", "6", "--seed", str(seed), *arguments])
    return capsys.readouterr()


def test_a_prompt_is_continued_as_if_it_were_alone(capsys):
    """Of another length than the one beside it, and in a batch of another size; progress is not on standard output."""
    together = run(capsys, "Hello", "What is a cache?")
    assert "prefill: 21 tokens of 2 prompts" in together.err
    head, first, middle, second = together.out.splitlines()
    assert (head, middle) == ("--- 1 of 2", "--- 2 of 2")
    assert first.startswith("Hello") and second.startswith("What is a cache?")
    assert run(capsys, "What is a cache?").out.splitlines() == [second]
    assert run(capsys, "What is a cache?", seed=1).out.splitlines() != [second]


def test_stop_tokens_are_those_of_the_folder(tmp_path):
    assert generate.stop_tokens_of(tmp_path, {}) == ()
    assert generate.stop_tokens_of(tmp_path, {"eos_token_id": 3}) == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert generate.stop_tokens_of(tmp_path, {"eos_token_id": 3}) == (4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "must not be empty"),
        (["--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        (["--prompt", "x", "--top-p", "2"], "top_p"),
        (["--prompt", "x", "--model", "/no/such/folder"], "no config.json"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(capsys, arguments, message):
    with pytest.raises(SystemExit):
        generate.main(["--model", str(LFM2), *arguments])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_vocabulary_too_small_for_bytes_is_refused(capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(LFM2, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        generate.main(["--model", str(folder), "--prompt", "x"])
