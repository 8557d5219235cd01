"""Continues prompts in one batch: python examples/generate.py --model DIR --prompt TEXT [--prompt TEXT ...]

Texts go to standard output, progress to standard error. Tokens come from the folder's `tokenizer.json`; without one,
they are bytes. What a prompt is continued with does not depend on the prompts beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decoding
import models
import rcache
from models import loading
from text import ByteTokenizer, load_tokenizer

BUCKETS = (16, 64, 256)  # tokens of a pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show_loading(num_bytes: int, all_bytes: int) -> None:
    """On a terminal, one line that grows."""
    if sys.stderr.isatty():
        print(f"\rloading: {num_bytes / 1e6:,.0f} of {all_bytes / 1e6:,.0f} MB", end="", file=sys.stderr, flush=True)


def stop_tokens_of(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: of `generation_config.json` if there is one, else of `config.json`."""
    path = folder / "generation_config.json"
    options = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stops = options.get("eos_token_id", config.get("eos_token_id"))
    return () if stops is None else tuple(np.atleast_1d(stops).tolist())


def complete(options: argparse.Namespace) -> None:
    """Loads, prefills, decodes, and prints."""
    began = time.perf_counter()
    config = loading.read_config(options.model)
    config = config.get("text_config", config)
    model = models.load(options.model, progress=show_loading)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    say(f"{options.model.name}: loaded in {time.perf_counter() - began:.1f} s")
    tokenizer = load_tokenizer(options.model, config["vocab_size"])
    first = config.get("bos_token_id")
    start = [] if first is None or isinstance(tokenizer, ByteTokenizer) else [first]
    prompts = [[*start, *tokenizer.encode(text)] for text in options.prompt]
    if not all(prompts):
        raise ValueError("--prompt must not be empty")
    context_length = max(map(len, prompts)) + options.max_new_tokens
    split = decoding.split(model)
    sequences = list(range(len(prompts)))
    cache = rcache.init(
        rcache.Config(
            model.cache_layers(),
            max_sequences=len(prompts),
            context_length=context_length,
            checkpoints=rcache.CheckpointPolicy(count=0),
        )
    )
    stops = options.stop_token if options.stop_token is not None else stop_tokens_of(options.model, config)
    say(f"prefill: {sum(map(len, prompts)):,} tokens of {len(prompts)} prompts")
    began = time.perf_counter()
    cache, logits, status = decoding.prefill(split, cache, prompts, sequences, buckets=BUCKETS)
    rcache.raise_if_error(status)
    jax.block_until_ready(logits)
    prefilled = time.perf_counter()
    keys = jax.vmap(jax.random.key)(jnp.full(len(prompts), options.seed, jnp.uint32))
    _, generated, status = decoding.generate(
        split,
        cache,
        jnp.asarray(sequences, jnp.int32),
        logits,
        max_new_tokens=options.max_new_tokens,
        stop_tokens=stops,
        sampling=decoding.Sampling(options.temperature, options.top_k, options.top_p),
        keys=keys,
    )
    rcache.raise_if_error(status)
    tokens, lengths = np.asarray(generated.tokens), np.asarray(generated.lengths)
    ended = time.perf_counter()
    for row, text in enumerate(options.prompt):
        answer = tokens[row, : lengths[row]].tolist()
        spoken = answer[:-1] if answer and answer[-1] in stops else answer
        if len(prompts) > 1:
            print(f"--- {row + 1} of {len(prompts)}")
        print(text + tokenizer.decode(spoken))
    say(f"prefill {prefilled - began:.1f} s; {lengths.sum()} new tokens {ended - prefilled:.1f} s; both compile first")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continues prompts, all in one batch.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each prompt, at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, help="sample from the likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from those of this probability together")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    parser.add_argument("--stop-token", type=int, action="append", metavar="ID", help="default: as the folder says")
    options = parser.parse_args(arguments)
    if options.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    try:
        complete(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
