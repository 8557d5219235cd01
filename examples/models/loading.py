"""Models from Hugging Face folders: `config.json` and one or several safetensors files."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

ModelT = TypeVar("ModelT", bound=nnx.Module)

Progress = Callable[[int, int], None]  # bytes read, of all
NO_PROGRESS: Progress = lambda num_bytes, all_bytes: None  # noqa: E731

# What stands in checkpoints beside a language model: heads that predict several tokens, and eyes.
_OTHER_PARTS = ("mtp.", "model.visual.")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<name>.*)\.weight")


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: not a folder that Hugging Face's save_pretrained wrote")
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
      ValueError: naming the file, if it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def read_weights(folder: str | Path, *, progress: Progress = NO_PROGRESS) -> dict[str, np.ndarray]:
    """Every tensor of a folder by name, in the type it is stored in (bfloat16 as ml_dtypes' NumPy type).

    Raises:
      ValueError: files that are not there, or are no safetensors.
    """
    weights: dict[str, np.ndarray] = {}
    paths = _weight_files(Path(folder))
    ends = np.cumsum([path.stat().st_size for path in paths]).tolist()
    for path, begin, end in zip(paths, [0, *ends], ends, strict=False):
        num_bytes = begin
        try:
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.keys():
                    weights[name] = tensors.get_tensor(name)
                    num_bytes += weights[name].nbytes
                    progress(num_bytes, ends[-1])
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from error
        progress(end, ends[-1])  # with the file's header
    return weights


def language_weights(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the language model, the equal tensors of experts as one: `[E, ...]` under `experts.<name>`."""
    kept, of_experts = {}, defaultdict(dict)
    for name, array in weights.items():
        if name.startswith(_OTHER_PARTS):
            continue
        name = name.replace("model.language_model.", "model.")  # as one part among others
        if match := _EXPERT.fullmatch(name):
            of_experts[f"{match['experts']}.{match['name']}"][int(match["index"])] = array
        else:
            kept[name] = array
    for name, arrays in of_experts.items():
        if sorted(arrays) != list(range(len(arrays))) or len({array.shape for array in arrays.values()}) > 1:
            raise ValueError(
                f"{name}: there must be equal weights of experts 0 to {len(arrays) - 1}, got {sorted(arrays)}"
            )
        kept[name] = np.stack([arrays[index] for index in range(len(arrays))])
    return kept


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    shards = sorted(set(read_json(index)["weight_map"].values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
    return [folder / shard for shard in shards]


def is_tied(weights: Mapping[str, np.ndarray], embedding: str, head: str) -> bool:
    """Whether the head is the embedding, of which the same is stored, or nothing.

    A head of its own counts, even if the config has `tie_word_embeddings`: the reference keeps it too.
    """
    return head not in weights or (embedding in weights and np.array_equal(weights[head], weights[embedding]))


def build(
    make: Callable[[], ModelT],
    weights: Mapping[str, np.ndarray],
    *,
    name_of: Callable[[str], str],
) -> ModelT:
    """The module that `make` describes, with its parameters taken from `weights` as float32.

    Args:
      make: makes the module; it is traced only, so that nothing is initialised in vain.
      weights: arrays by checkpoint name.
      name_of: checkpoint name of a parameter, given its path in the module, such as `layers.0.ffn_norm.weight`.

    Raises:
      ValueError: naming every tensor that is missing, unexpected or of another shape.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    wanted = {name_of(".".join(map(str, path))): (path, leaf) for path, leaf in nnx.to_flat_state(abstract)}
    problems = [f"missing: {name} {list(leaf.shape)}" for name, (_, leaf) in wanted.items() if name not in weights]
    problems += [f"unexpected: {name}" for name in weights if name not in wanted]
    problems += [
        f"mis-shaped: {name} is {list(weights[name].shape)}, the config says {list(leaf.shape)}"
        for name, (_, leaf) in wanted.items()
        if name in weights and weights[name].shape != leaf.shape
    ]
    if problems:
        raise ValueError("the weights do not fit the config:\n  " + "\n  ".join(sorted(problems)))
    loaded = [(path, leaf.replace(jnp.asarray(weights[name], jnp.float32))) for name, (path, leaf) in wanted.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))
