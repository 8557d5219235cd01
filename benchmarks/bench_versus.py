"""The same checkpoints here and in Hugging Face transformers on PyTorch, each decoding with its own cache."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_models import cache_for, prompts_of
from measure import Measure, Unavailable, median_ratio, medians

import decoding
import models
import rcache

FOLDERS = Path(__file__).resolve().parent.parent / "tests" / "data" / "hf"
FAMILIES = ("lfm2", "qwen3_next", "qwen3_5", "nemotron_h", "granitemoehybrid", "recurrent_gemma")
NUM_ROWS = 8
PREFILL = 512  # all these checkpoints have a context of 512 or more
PROMPT, NEW = 64, 64  # tokens decoding begins behind, and those it adds
ROUNDS = 9
NUM_THREADS = 2  # at most, on either side

Timed = tuple[float, np.ndarray]  # seconds, and the tokens chosen: [B, any number]


@dataclass
class Side:
    """One of the two implementations. Both choose greedily; what is timed ends with the tokens at hand."""

    prefill: Callable[[], Timed]
    decode: Callable[[], Timed]


def versus() -> list[Measure]:
    """Tokens a second over theirs: so many times as fast."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise Unavailable("PyTorch and transformers are not installed: pip install -e '.[bench]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    measures = []
    with torch.inference_mode():
        for family in FAMILIES:
            measures += _versus(family)
    return measures


def _versus(family: str) -> list[Measure]:
    folder = FOLDERS / family
    model = models.load(folder)
    prompts = np.array(prompts_of(model.config.vocab_size, np.full(NUM_ROWS, PREFILL)), np.int32)
    return [
        _measure(f"versus decode, {family}", "decode", 10.0, NEW, model, folder, prompts),
        _measure(f"versus prefill, {family}", "prefill", 2.0, PREFILL, model, folder, prompts[:1]),
        _measure(f"versus prefill of {NUM_ROWS}, {family}", "prefill", 2.0, PREFILL, model, folder, prompts),
    ]


def _measure(
    name: str, kind: str, goal: float, num_tokens: int, model: models.LanguageModel, folder: Path, prompts: np.ndarray
) -> Measure:
    """Both sides in turn; `num_tokens` of each row are what their seconds are for."""
    here = getattr(_here(model, prompts), kind)
    compile_seconds = here()[0]
    sides = {"here": here, "there": _with_best_threads(getattr(_there(folder, prompts), kind))}
    times: dict[str, list[float]] = {side: [] for side in sides}
    tokens = {}
    for _ in range(ROUNDS):
        for side, call in sides.items():
            call()  # does not count: the other side's threads wait for work a while longer
            taken, tokens[side] = call()
            times[side].append(taken)
    differing = int(np.sum(np.any(tokens["here"] != tokens["there"], axis=1)))
    return Measure(
        name,
        median_ratio(times["there"], times["here"]),
        goal=goal,
        at_least=True,
        seconds=medians(times, num_tokens),
        compile_seconds=compile_seconds,
        note=f"{differing} of {len(prompts)} rows have other tokens" if differing else "",
    )


def _here(model: models.LanguageModel, prompts: np.ndarray) -> Side:
    """This project's side. Its first calls compile."""
    split = decoding.split(model)
    num_rows = len(prompts)
    sequences = jnp.arange(num_rows, dtype=jnp.int32)

    def run_prompts(num_tokens: int) -> tuple[rcache.Cache, jax.Array, float]:
        context = PROMPT + NEW if num_tokens == PROMPT else PREFILL
        cache = jax.block_until_ready(cache_for(model, num_rows, context))
        rows = prompts[:, :num_tokens].tolist()
        start = time.perf_counter()
        cache, logits, status = decoding.prefill(split, cache, rows, range(num_rows), buckets=(num_tokens,))
        jax.block_until_ready(logits)
        taken = time.perf_counter() - start
        rcache.raise_if_error(status)
        return cache, logits, taken

    def prefill() -> Timed:
        _, logits, taken = run_prompts(PREFILL)
        return taken, np.argmax(np.asarray(logits), axis=-1)[:, None]

    def decode() -> Timed:
        cache, logits, _ = run_prompts(PROMPT)
        start = time.perf_counter()
        _, generated, status = decoding.generate(split, cache, sequences, logits, max_new_tokens=NEW)
        tokens = np.asarray(generated.tokens)
        taken = time.perf_counter() - start
        rcache.raise_if_error(status)
        return taken, tokens

    return Side(prefill, decode)


def _there(folder: Path, prompts: np.ndarray) -> Side:
    """PyTorch's side: its attention kernels, a loop of its own around them, which is faster than `model.generate`."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.from_numpy(prompts.astype(np.int64))

    def run(tokens: Any, cache: Any) -> Any:
        logits = model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def empty_cache() -> Any:
        if hasattr(model.model, "_setup_cache"):  # RecurrentGemma keeps its states in the model
            model.model._setup_cache(model.config, len(prompts), ids.device, torch.float32)
        return DynamicCache(config=model.config)

    def prefill() -> Timed:
        cache = empty_cache()
        start = time.perf_counter()
        token = run(ids, cache)
        return time.perf_counter() - start, token.numpy()

    def decode() -> Timed:
        cache = empty_cache()
        tokens = [run(ids[:, :PROMPT], cache)]
        start = time.perf_counter()
        while len(tokens) < NEW:
            tokens.append(run(tokens[-1], cache))
        return time.perf_counter() - start, torch.cat(tokens, dim=1).numpy()

    return Side(prefill, decode)


def _with_best_threads(call: Callable[[], Timed]) -> Callable[[], Timed]:
    """With as many threads as are fastest: operations may be too small for a second one to help."""
    import torch

    def with_threads(number: int) -> Timed:
        torch.set_num_threads(number)
        return call()

    best = min(range(1, NUM_THREADS + 1), key=lambda number: min(with_threads(number)[0] for _ in range(4)))
    return lambda: with_threads(best)
