"""Continues prompts in one batch: python examples/generate.py --model DIR --prompt TEXT [--prompt TEXT ...]

Texts go to standard output, progress to standard error. Tokens come from the folder's `tokenizer.json`; without one,
they are bytes. What a prompt is continued with does not depend on the prompts beside it: each has a sequence of one
cache to itself, and draws of its own. (Passes of other shapes round differently: where two tokens are equally likely to
the last digits, the choice may differ.) The same prompt, given again, is continued in another way.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decoding
import models
import rcache
from models import LanguageModel, loading
from text import Tokenizer, escaped, language_options, load_tokenizer, start_tokens, stop_tokens

BUCKETS = (16, 64, 256)  # tokens of a pass; longer prompts take several
EVERY_SECONDS = (10.0, 0.1)  # how often progress is shown: in a file, on a terminal


class Progress:
    """Lines on standard error. On a terminal, what is under way is one line that is written over."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._shown = time.perf_counter()
        self._width = 0  # of the line that can be written over

    def update(self, text: str, *, at_once: bool = False) -> None:
        """What is under way; left out if something was shown a moment ago, unless it is to be shown at once."""
        now = time.perf_counter()
        if at_once or now - self._shown >= EVERY_SECONDS[self._on_terminal]:
            self._shown = now
            self._print(text, "" if self._on_terminal else "\n")

    def line(self, text: str) -> None:
        """What is done."""
        self._print(text, "\n")

    def close(self) -> None:
        """Leaves the line that was under way."""
        if self._width:
            print(file=sys.stderr)
            self._width = 0

    def _print(self, text: str, end: str) -> None:
        begin = "\r" if self._width else ""
        print(f"{begin}{text:<{self._width}}", end=end, file=sys.stderr, flush=True)
        self._width = 0 if end else len(text)


@contextmanager
def compile_clock() -> Iterator[Callable[[], float]]:
    """Reads the seconds that JAX has traced and compiled for since then. What is traced within another counts once."""
    spans: list[tuple[float, float]] = []  # begin and seconds, one behind another

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        begin = time.perf_counter() - duration_secs
        while spans and spans[-1][0] >= begin:
            spans.pop()
        spans.append((begin, duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: sum(seconds for _, seconds in spans)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclass(frozen=True)
class Request:
    """What is to be continued, and how: all that can be checked before the weights are there."""

    texts: list[str]
    prompts: list[list[int]]  # their tokens
    tokenizer: Tokenizer
    context_length: int
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: decoding.Sampling
    seed: int


def read_request(options: argparse.Namespace) -> Request:
    """Raises `ValueError` if something about `options` or the folder does not fit."""
    folder: Path = options.model
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be at least 0 and less than 2**32, got {options.seed}")
    sampling = decoding.Sampling(options.temperature, options.top_k, options.top_p)
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    config = language_options(loading.read_config(folder))
    if "vocab_size" not in config:
        raise ValueError(f"{folder}: config.json has no vocab_size")
    vocab_size: int = config["vocab_size"]
    tokenizer = load_tokenizer(folder, vocab_size)
    start = start_tokens(folder, tokenizer, config)
    prompts = [tokens_of(text, tokenizer, start, vocab_size) for text in options.prompts]
    longest = max(map(len, prompts))
    needed = longest + options.max_new_tokens
    context_length = needed if options.context_length is None else options.context_length
    if needed > context_length:
        raise ValueError(
            f"--context-length {context_length} is too short: the longest prompt has {longest} tokens, "
            f"which are {needed} with {options.max_new_tokens} new ones"
        )
    given = options.stop_token or ()
    if outside := [token for token in given if not 0 <= token < vocab_size]:
        raise ValueError(f"--stop-token {outside[0]} is not in the vocabulary of {vocab_size}")
    stops = () if options.no_stop else tuple(given) or stop_tokens(folder, config)
    return Request(
        options.prompts, prompts, tokenizer, context_length, options.max_new_tokens, stops, sampling, options.seed
    )


def tokens_of(text: str, tokenizer: Tokenizer, start: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens of a prompt, behind those of `start`, unless it begins with them itself."""
    if any("\ud800" <= c <= "\udfff" for c in text):  # how Python passes on bytes of the command line that are no text
        raise ValueError(f"a prompt is not UTF-8: {text!r}")
    tokens = tokenizer.encode(text)
    if not tokens:
        raise ValueError("a prompt is empty" if not text else f"a prompt has no tokens: {text!r}")
    if tokens[: len(start)] != list(start):
        tokens = [*start, *tokens]
    if (largest := max(tokens)) >= vocab_size:
        raise ValueError(
            f"token {largest} ({tokenizer.decode([largest])!r}) of the tokenizer is not in the model's vocabulary of "
            f"{vocab_size}"
        )
    return tokens


def keys_of(prompts: Sequence[Sequence[int]], seed: int) -> jax.Array:
    """key[B], of each prompt's draws: from the seed, its own tokens, and how often it stood before."""
    contents, repeats = [], []
    seen: Counter[tuple[int, ...]] = Counter()
    for prompt in prompts:
        contents.append(zlib.crc32(np.asarray(prompt, "<i4").tobytes()))
        repeats.append(seen[tuple(prompt)])
        seen[tuple(prompt)] += 1
    root = jax.random.key(np.uint32(seed))
    draw = lambda content, repeat: jax.random.fold_in(jax.random.fold_in(root, content), repeat)  # noqa: E731
    return jax.vmap(draw)(jnp.array(contents, jnp.uint32), jnp.array(repeats, jnp.uint32))


def load(folder: Path, progress: Progress) -> LanguageModel:
    """The model, with progress."""
    began = time.perf_counter()
    read = 0

    def show(num_bytes: int, all_bytes: int) -> None:
        nonlocal read
        read = num_bytes
        progress.update(f"loading: {num_bytes / all_bytes:.0%} of {all_bytes / 1e6:,.1f} MB")

    model = models.load(folder, progress=show)
    progress.line(f"{folder.resolve().name}: {read / 1e6:,.1f} MB loaded in {time.perf_counter() - began:.1f} s")
    return model


@dataclass(frozen=True)
class Times:
    """Seconds of the two parts of a run, and those of compiling, which are in neither."""

    prefill: float
    decode: float
    compile: float


def complete(model: LanguageModel, request: Request, progress: Progress) -> tuple[list[list[int]], Times]:
    """The new tokens of each prompt, a stop token included, and what they took."""
    split = decoding.split(model)
    prompts = request.prompts
    cache = rcache.init(
        rcache.Config(
            model.cache_layers(),
            max_sequences=len(prompts),
            context_length=request.context_length,
            max_pass_tokens=decoding.bucket_of(max(map(len, prompts)), BUCKETS),
            checkpoints=rcache.CheckpointPolicy(count=0),
        )
    )
    keys = keys_of(prompts, request.seed)
    num_tokens = sum(map(len, prompts))
    with compile_clock() as compiled:
        began = time.perf_counter()
        progress.update(f"prefill: 0 of {num_tokens:,} tokens, compiling", at_once=True)
        sequences = range(len(prompts))
        cache, logits, status = decoding.prefill(
            split,
            cache,
            prompts,
            sequences,
            buckets=BUCKETS,
            progress=lambda done: progress.update(f"prefill: {done:,} of {num_tokens:,} tokens"),
        )
        rcache.raise_if_error(status)
        prefilled, compiled_before = time.perf_counter(), compiled()
        progress.update(f"decode: at most {request.max_new_tokens:,} tokens a prompt, compiling first", at_once=True)
        _, generated, status = decoding.generate(
            split,
            cache,
            jnp.asarray(sequences, jnp.int32),
            logits,
            max_new_tokens=request.max_new_tokens,
            stop_tokens=request.stop_tokens,
            sampling=request.sampling,
            keys=keys,
        )
        rcache.raise_if_error(status)
        tokens, lengths = np.asarray(generated.tokens), np.asarray(generated.lengths)
        ended, compiled_after = time.perf_counter(), compiled()
    times = Times(
        prefill=prefilled - began - compiled_before,
        decode=ended - prefilled - (compiled_after - compiled_before),
        compile=compiled_after,
    )
    return [tokens[row, : lengths[row]].tolist() for row in sequences], times


def continuation(request: Request, row: int, answer: Sequence[int]) -> str:
    """The text of an answer without the stop token, as it stands behind its prompt.

    On its own it might be another: some tokenizers leave out a space at the beginning.
    """
    spoken = list(answer[:-1] if answer[-1] in request.stop_tokens else answer)
    prompt, decode = request.prompts[row], request.tokenizer.decode
    before, whole = decode(prompt), decode([*prompt, *spoken])
    return whole.removeprefix(before) if whole.startswith(before) else decode(spoken)


def show_texts(request: Request, answers: Sequence[Sequence[int]]) -> None:
    """Each prompt with its continuation, under a heading if there are several. A terminal is spared control codes."""
    for row, text in enumerate(request.texts):
        if len(request.texts) > 1:
            print(f"{'' if row == 0 else chr(10)}--- {row + 1} of {len(request.texts)}")
        text += continuation(request, row, answers[row])
        print(escaped(text, keep="\n\t") if sys.stdout.isatty() else text, flush=True)


def show_times(request: Request, answers: Sequence[Sequence[int]], times: Times, progress: Progress) -> None:
    progress.line(f"compile: {times.compile:.2f} s")
    num_run, num_new = sum(map(len, request.prompts)), sum(map(len, answers))
    for name, number, seconds in (("prefill", num_run, times.prefill), ("decode", num_new, times.decode)):
        progress.line(f"{name}: {number:,} tokens in {seconds:.2f} s, {number / max(seconds, 1e-9):,.0f} tokens/s")


def prompt_of_file(name: str) -> str:
    """The text of a file, `-` being standard input, without the line break at its end."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{name} is not UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Continues prompts, all in one batch.",
        usage="%(prog)s --model DIR --prompt TEXT [--prompt TEXT ...] [options]",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=prompt_of_file,
        metavar="PATH",
        help="a prompt from a file, or from standard input (-); may be given several times",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each, at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="only from the likeliest with this probability together"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (%(default)s)")
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="tokens of a sequence; default: what the longest prompt needs"
    )
    stops = parser.add_mutually_exclusive_group()
    stops.add_argument(
        "--stop-token",
        type=int,
        action="append",
        metavar="ID",
        help="ends a text; may be given several times; default: the EOS tokens that the folder names",
    )
    stops.add_argument("--no-stop", action="store_true", help="no token ends a text")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not options.prompts:
        parser.error("give at least one --prompt or --prompt-file")
    progress = Progress()
    try:
        request = read_request(options)
        model = load(options.model, progress)
    except (ValueError, OSError) as error:
        progress.close()
        parser.error(str(error))
    answers, times = complete(model, request, progress)
    progress.close()
    show_texts(request, answers)
    show_times(request, answers, times, progress)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a text may have characters that a terminal has not
    main()
