"""Continuing prompts from the command line: `examples/generate.py`.

All runs have one or three rows, passes of `PASS` tokens and room for `NEW` more, so that six programs are compiled.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import decoding
import generate
import models
import text
from models.passes import WholePass

ROOT = Path(__file__).parent.parent
LFM2 = ROOT / "tests" / "data" / "hf" / "lfm2"
BUCKETS = generate.BUCKETS
PASS, NEW, CONTEXT = 16, 8, 64
GREEDY, SAMPLED = ("--temperature", "0"), ("--temperature", "0.8")
PROMPTS = ("Hi", "What is a cache?", "A prompt that takes more than two passes.")  # 2, 16 and 41 bytes


def make_folder(folder, **config):
    """LFM2's first two layers, one of each type, with other options."""
    folder.mkdir()
    options = json.loads((LFM2 / "config.json").read_text())
    options |= {"num_hidden_layers": 2, "layer_types": options["layer_types"][:2]} | config
    (folder / "config.json").write_text(json.dumps(options))
    weights = load_file(LFM2 / "model.safetensors")
    kept = {name: array for name, array in weights.items() if not re.search(r"layers\.[^01]\.", name)}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder that no test changes."""
    return make_folder(tmp_path_factory.mktemp("generate") / "small")


@pytest.fixture
def folder(tmp_path):
    """A folder to put something into."""
    return make_folder(tmp_path / "model")


@pytest.fixture
def run(small, monkeypatch, capsys):
    """Runs the program: what it wrote, with the new tokens of each row."""
    monkeypatch.setattr(generate, "BUCKETS", (PASS,))
    complete, answers = generate.complete, []

    def recording(*arguments):
        answers[:], times = complete(*arguments)
        return answers, times

    monkeypatch.setattr(generate, "complete", recording)

    def runs(*arguments, prompts=("Hi",), folder=small):
        given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
        sizes = ["--max-new-tokens", str(NEW), "--context-length", str(CONTEXT)]
        generate.main(["--model", str(folder), *sizes, *given, *arguments])
        out, err = capsys.readouterr()
        return list(answers), out, err

    return runs


@pytest.fixture
def refused(small, capsys):
    """What a refusal says: one line behind the usage, exit code 2, nothing on standard output."""

    def message(*arguments, folder=small):
        with pytest.raises(SystemExit) as stopped:
            generate.main(["--model", str(folder), *arguments])
        out, err = capsys.readouterr()
        assert stopped.value.code == 2 and out == ""
        usage, line = err.splitlines()
        assert usage.startswith("usage: ")
        return line

    return message


# What is generated


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prompt_is_continued_as_if_it_were_alone(run, how):
    together, out, _ = run("--no-stop", *how, prompts=PROMPTS)
    alone = [run("--no-stop", *how, prompts=[prompt]) for prompt in PROMPTS]
    assert [tokens for [tokens], _, _ in alone] == together
    assert out == "\n".join(f"--- {i + 1} of 3\n{text}" for i, (_, text, _) in enumerate(alone))
    assert all(text.startswith(prompt) for prompt, (_, text, _) in zip(PROMPTS, alone, strict=True))
    # Nor does it matter which row it has.
    backwards, _, _ = run("--no-stop", *how, prompts=PROMPTS[::-1])
    assert backwards[::-1] == together


def test_greedy_tokens_are_the_likeliest_ones(run, small):
    """Of the model without a cache, which sees the tokens before each."""
    [tokens], _, _ = run("--no-stop", *GREEDY)
    everything = [*b"Hi", *tokens]
    num_tokens = len(everything)
    whole = WholePass.of(jnp.array([num_tokens], jnp.int32), num_tokens)
    split = decoding.split(models.load(small))
    logits = jax.jit(lambda split, tokens: split.merge()(tokens, None, whole)[0])(split, jnp.array([everything]))
    assert np.asarray(logits)[0, 1:-1].argmax(-1).tolist() == tokens


def test_a_seed_gives_the_same_text(run):
    first, second, other = (run("--no-stop", *SAMPLED, "--seed", seed)[1] for seed in ("3", "3", "4"))
    assert first == second != other


def test_the_same_prompt_is_continued_in_several_ways(run):
    """The first of them as if it were alone, whatever is between them."""
    tokens, _, _ = run("--no-stop", *SAMPLED, prompts=["Hi", "Ho", "Hi"])
    assert len(set(map(tuple, tokens))) == 3
    assert run("--no-stop", *SAMPLED)[0] == tokens[:1]
    assert run("--no-stop", *SAMPLED, prompts=["Hi", "Hi", "Ho"])[0] == [tokens[0], tokens[2], tokens[1]]


def test_options_are_passed_on(small, monkeypatch):
    """Without running anything."""
    seen = {}

    def stub(model, request, progress):
        seen["request"] = request
        return [[65]], generate.Times(0.0, 0.0, 0.0)

    monkeypatch.setattr(generate, "complete", stub)

    def request(*arguments):
        generate.main(["--model", str(small), "--prompt", "Hi", *arguments])
        return seen["request"]

    default = request()
    assert default.sampling == decoding.Sampling(temperature=0.8, top_k=None, top_p=1.0)
    assert (default.max_new_tokens, default.context_length, default.seed) == (64, 2 + 64, 0)
    assert default.stop_tokens == (2,)
    given = request("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "5", "--max-new-tokens", "9")
    assert given.sampling == decoding.Sampling(0.5, 7, 0.9)
    assert (given.max_new_tokens, given.context_length, given.seed) == (9, 11, 5)
    assert request("--context-length", "100").context_length == 100
    assert request("--stop-token", "7", "--stop-token", "9").stop_tokens == (7, 9)
    assert request("--no-stop").stop_tokens == ()


# Stop tokens


def test_a_text_ends_before_the_first_stop_token(run, folder):
    [free], _, _ = run("--no-stop", *GREEDY)
    assert len(free) == NEW
    assert free[3] not in free[:3]
    expected = "Hi" + text.ByteTokenizer().decode(free[:3]) + "\n"
    config = json.loads((folder / "config.json").read_text())
    for named in (free[3], [255, free[3]]):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": named}))
        assert run(*GREEDY, folder=folder)[:2] == ([free[:4]], expected)
    assert run(*GREEDY, "--no-stop", folder=folder)[0] == [free]
    assert run(*GREEDY, "--stop-token", str(free[3]), "--stop-token", "255")[:2] == ([free[:4]], expected)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[3]]}))
    assert run(*GREEDY, folder=folder)[:2] == ([free[:4]], expected)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": None}, {}, ()),
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": [5, 3]}, {}, (3, 5)),
        ({}, {"eos_token_id": 4}, (4,)),
        ({"eos_token_id": 3}, {"eos_token_id": [4, 3]}, (3, 4)),
        ({"text_config": {"eos_token_id": 6}}, None, (6,)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": None}}, None, (3,)),
    ],
)
def test_stop_tokens_are_those_of_both_configs(tmp_path, config, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert text.stop_tokens(tmp_path, text.language_options(config)) == expected


# Tokenizers


def put_tokenizer(folder, *, start=None, end=None, num_words=256, limit=None):
    """A tokenizer of whole words, `w3` being token 3, that writes its spaces at the beginning of words."""
    words = {"<s>": 1, "</s>": 2} | {f"▁w{i}": i for i in range(num_words) if i not in (1, 2)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁w0"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    if start or end:
        pattern = " ".join(filter(None, (start, "$A", end)))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=pattern, special_tokens=[(word, words[word]) for word in (start, end) if word]
        )
    if limit:
        tokenizer.enable_truncation(limit)
        tokenizer.enable_padding(length=limit)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_with_a_tokenizer(run, folder):
    """The prompt begins with BOS, which is not shown; words go on behind a space."""
    put_tokenizer(folder, start="<s>")
    [tokens], out, err = run("--no-stop", *GREEDY, prompts=["w7 w8"], folder=folder)
    assert "prefill: 3 tokens in" in err
    shown = [{1: "<s>", 2: "</s>"}.get(token, f" w{token}") for token in tokens]
    assert out == "w7 w8" + "".join(shown) + "\n"
    # Who writes BOS down has it once.
    assert run("--no-stop", *GREEDY, prompts=["<s>w7 w8"], folder=folder)[0] == [tokens]


@pytest.mark.parametrize(
    ("template", "tokenizer_config", "bos", "expected"),
    [
        ({"start": "<s>"}, None, None, [1]),
        ({"start": "<s>", "end": "</s>"}, {"add_bos_token": False}, 5, [1]),
        ({"end": "</s>"}, {"add_bos_token": True}, 5, [5]),
        ({}, {"add_bos_token": True}, 5, [5]),
        ({}, {"add_bos_token": False}, 5, []),
        ({}, {"add_bos_token": None}, 5, []),
        ({}, {}, 5, []),
        ({}, {"add_bos_token": True}, None, []),
        ({}, None, 5, [5]),
        ({}, None, None, []),
    ],
)
def test_texts_begin_as_the_tokenizer_says(tmp_path, template, tokenizer_config, bos, expected):
    put_tokenizer(tmp_path, **template)
    if tokenizer_config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    tokenizer = text.load_tokenizer(tmp_path, 256)
    options = text.language_options({"text_config": {"bos_token_id": bos}})
    assert text.start_tokens(tmp_path, tokenizer, options) == expected


def test_bytes_have_no_beginning(tmp_path):
    assert text.start_tokens(tmp_path, text.load_tokenizer(tmp_path, 256), {"bos_token_id": 1}) == []


def test_a_tokenizer_neither_cuts_nor_pads(tmp_path):
    tokenizer = text.load_tokenizer(put_tokenizer(tmp_path, limit=2), 256)
    assert tokenizer.encode("w5") == [5]
    assert tokenizer.encode("w5 w6 w7") == [5, 6, 7]


# Where prompts come from


class Pipe(io.TextIOWrapper):
    def __init__(self, content):
        super().__init__(io.BytesIO(content), encoding="ascii")


def test_prompts_from_files_keep_their_place(run, tmp_path, monkeypatch):
    """They are UTF-8 whatever the locale, and the line break at the end of a file is none of the prompt's."""
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe\r\nzwei\r\n")
    monkeypatch.setattr(sys, "stdin", Pipe("¿Qué?\n\n".encode()))
    given = ("--prompt-file", "-", "--prompt", "Hi", "--prompt-file", str(tmp_path / "prompt.txt"))
    _, out, _ = run("--no-stop", *GREEDY, *given, prompts=[])
    texts = re.fullmatch(r"--- 1 of 3\n(.*)\n\n--- 2 of 3\n(.*)\n\n--- 3 of 3\n(.*)\n", out, re.DOTALL).groups()
    for got, prompt in zip(texts, ("¿Qué?\n", "Hi", "Grüße\r\nzwei"), strict=True):
        assert got.startswith(prompt) and len(got) > len(prompt)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "at least one --prompt or --prompt-file"),
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "Hi", "--prompt", ""], "a prompt is empty"),
        (["--prompt", "\udcff"], r"a prompt is not UTF-8: '\udcff'"),
        (["--prompt-file", "/no/such/file"], "argument --prompt-file: /no/such/file: No such file or directory"),
        (["--prompt-file", str(ROOT)], "Is a directory"),
        (["--prompt-file", str(LFM2 / "expected.npz")], "expected.npz is not UTF-8"),
        (["--prompt", "Hi", "--model", "/no/such/folder"], "no such folder: /no/such/folder"),
        (["--prompt", "Hi", "--model", str(ROOT)], "no config.json"),
        (["--prompt", "Hi", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", "Hi", "--temperature", "-1"], "temperature must be a number that is not negative, got -1.0"),
        (["--prompt", "Hi", "--top-k", "0"], "top_k must be at least 1"),
        (["--prompt", "Hi", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["--prompt", "Hi", "--seed", "-1"], "--seed must be at least 0 and less than 2**32, got -1"),
        (["--prompt", "Hi", "--stop-token", "256"], "--stop-token 256 is not in the vocabulary of 256"),
        (["--prompt", "Hi", "--stop-token", "-1"], "--stop-token -1 is not in the vocabulary of 256"),
        (["--prompt", "Hi", "--stop-token", "1", "--no-stop"], "not allowed with argument"),
        (
            ["--prompt", "Hi", "--prompt", "Hello", "--max-new-tokens", "4", "--context-length", "8"],
            "--context-length 8 is too short: the longest prompt has 5 tokens, which are 9 with 4 new ones",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(refused, arguments, message):
    assert message in refused(*arguments)


def test_folders_that_do_not_fit_are_refused_in_a_line(refused, folder, monkeypatch):
    def says(name, content):
        """With other contents in a file."""
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        line = refused("--prompt", "w7 w8", folder=folder)
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)
        return line

    config = json.loads((folder / "config.json").read_text())
    assert "a vocabulary of 100 is too small for bytes" in says("config.json", config | {"vocab_size": 100})
    assert "no vocab_size" in says("config.json", {"model_type": "lfm2"})
    assert "generation_config.json: Expecting" in says("generation_config.json", b"{")
    assert "tokenizer.json is not a tokenizer" in says("tokenizer.json", b"{}")
    assert "model_type 'gpt2' is not here" in says("config.json", config | {"model_type": "gpt2"})
    assert "header" in says("model.safetensors", b"not tensors")
    put_tokenizer(folder, num_words=300)
    assert refused("--prompt", "w280", folder=folder).endswith(
        "token 280 ('w280') of the tokenizer is not in the model's vocabulary of 256"
    )
    assert "a prompt is empty" in refused("--prompt", "", folder=folder)  # BOS or not
    assert "a prompt is not UTF-8" in refused("--prompt", "\udcff", folder=folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not installed
    assert "needs the package `tokenizers`" in refused("--prompt", "w7", folder=folder)


# Progress


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_file_is_a_few_lines(run):
    [_, _, longest], _, err = run("--no-stop", *GREEDY, prompts=PROMPTS)
    assert len(longest) == NEW and "\r" not in err
    patterns = [
        r"small: 0\.\d MB loaded in \d+\.\d s",
        r"prefill: 0 of 59 tokens, compiling",
        r"decode: at most 8 tokens a prompt, compiling first",
        r"compile: \d+\.\d\d s",
        r"prefill: 59 tokens in \d+\.\d\d s, [\d,]+ tokens/s",
        r"decode: 24 tokens in \d+\.\d\d s, [\d,]+ tokens/s",
    ]
    for line, pattern in zip(err.splitlines(), patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_progress_on_a_terminal_is_one_line_written_over(run, monkeypatch):
    """Every pass is shown, if it takes its time; nothing of a longer line stays behind a shorter one."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(generate, "EVERY_SECONDS", (0.0, 0.0))
    run("--no-stop", *GREEDY, prompts=PROMPTS)
    written = screen.getvalue()
    assert "loading: 9" in written and "% of 0." in written
    lines = [line.split("\r") for line in written.split("\n")]
    assert [states[-1].rstrip().partition(":")[0] for states in lines] == [
        "small", "decode", "compile", "prefill", "decode", "",
    ]  # fmt: skip
    passes = ["0 of 59 tokens, compiling", "34 of 59 tokens", "50 of 59 tokens", "59 of 59 tokens"]
    assert [state.rstrip() for state in lines[1][:-1]] == [f"prefill: {done}" for done in passes]
    for states in lines:
        assert all(len(later) >= len(earlier.rstrip()) for earlier, later in pairwise(states))


def test_a_refusal_leaves_the_line_that_was_under_way(folder, monkeypatch, capsys):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(generate, "EVERY_SECONDS", (0.0, 0.0))
    weights = load_file(folder / "model.safetensors")
    del weights["model.embedding_norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SystemExit):
        generate.main(["--model", str(folder), "--prompt", "Hi"])
    loading, usage = screen.getvalue().split("\n")[:2]
    assert "loading: " in loading and usage.startswith("usage: ")


def test_a_terminal_is_spared_control_codes(small, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(generate, "complete", lambda *_: ([list(b"\n\x1b[2J\t!")], generate.Times(0.0, 0.0, 0.0)))
    generate.main(["--model", str(small), "--prompt", "Hi"])
    assert screen.getvalue() == "Hi\n\\x1b[2J\t!\n"


def test_compiling_is_timed_apart():
    """Once, though the function that is compiled has another within it; and not at all when it is there already."""
    inner = jax.jit(lambda x: (time.sleep(0.05), x + 1)[1])
    outer = jax.jit(lambda x: (time.sleep(0.05), inner(x) * inner(x))[1])
    x = jnp.ones(3)
    with generate.compile_clock() as compiled:
        began = time.perf_counter()
        outer(x).block_until_ready()
        first, wall = compiled(), time.perf_counter() - began
        outer(x).block_until_ready()
        assert 0.1 < first <= wall
        assert compiled() == first
    jax.jit(lambda x: x * 3)(x)
    assert compiled() == first


def test_draws_differ_in_every_row():
    """Of other prompts, of the same, and of other seeds; not of the rows that a prompt might have."""
    prompts = [[1], [1, 1], [1], [2], [1]]
    keys = np.asarray(jax.random.key_data(generate.keys_of(prompts, 0)))
    assert len(np.unique(keys, axis=0)) == 5
    other = np.asarray(jax.random.key_data(generate.keys_of([[2], [1], [1]], 0)))
    np.testing.assert_array_equal(other, keys[[3, 0, 2]])
    assert not np.array_equal(jax.random.key_data(generate.keys_of([[1]], 2**32 - 1))[0], keys[0])


def test_it_runs_from_anywhere(run, small, tmp_path):
    """As a program of its own, with the same text as here, though its context is shorter than any pass is."""
    arguments = ["--max-new-tokens", str(NEW), "--no-stop", "--prompt-file", "-"]
    assert len("Hi") + NEW < min(BUCKETS)
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "generate.py"),
            "--model",
            os.path.relpath(small, tmp_path),
            *arguments,
        ],
        input=b"Hi\n",
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.decode() == run("--no-stop", *SAMPLED)[1]
    assert ended.stderr.decode().startswith("small: ") and b"\r" not in ended.stderr
