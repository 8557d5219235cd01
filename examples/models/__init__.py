"""Language models over the cache, by the `model_type` of their Hugging Face config."""

from __future__ import annotations

from pathlib import Path

from models import loading
from models.layers import LanguageModel
from models.lfm2 import Lfm2

MODELS: dict[str, type[LanguageModel]] = {"lfm2": Lfm2}


def load(folder: str | Path) -> LanguageModel:
    """The model in a Hugging Face folder (`config.json`, safetensors), in float32.

    Raises:
      ValueError: no such architecture, an option it does not have here, or weights that do not fit the config.
    """
    config = loading.read_config(folder)
    model_type = config.get("model_type")
    if model_type not in MODELS:
        raise ValueError(f"{folder}: model_type {model_type!r} is not here; these are: {', '.join(MODELS)}")
    model_class = MODELS[model_type]
    options = model_class.Config.from_hf(config)
    weights = loading.read_weights(folder)
    if options.tie_embeddings:
        weights = loading.without_tied_head(weights, model_class.checkpoint_name("embed_tokens.weight"))
    return loading.build(lambda: model_class(options), weights, name_of=model_class.checkpoint_name)


__all__ = ["MODELS", "LanguageModel", "load"]
