"""Language models over the cache, by the `model_type` of their Hugging Face config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from models import loading
from models.granitemoehybrid import GraniteMoeHybrid
from models.language_model import LanguageModel
from models.lfm2 import Lfm2
from models.nemotron_h import NemotronH
from models.qwen3_5 import Qwen3_5
from models.qwen3_next import Qwen3Next
from models.recurrent_gemma import RecurrentGemma

MODELS: dict[str, type[LanguageModel]] = {
    "granitemoehybrid": GraniteMoeHybrid,
    "lfm2": Lfm2,
    "nemotron_h": NemotronH,
    "qwen3_5": Qwen3_5,
    "qwen3_5_text": Qwen3_5,
    "qwen3_next": Qwen3Next,
    "recurrent_gemma": RecurrentGemma,
}


def load(folder: str | Path, *, progress: loading.Progress = loading.NO_PROGRESS) -> LanguageModel:
    """The model in a Hugging Face folder (`config.json`, safetensors), in float32.

    Args:
      folder: where it is.
      progress: called with the bytes read so far, and of all files.

    Raises:
      ValueError: no such architecture, an option it does not have here, or weights that do not fit the config.
    """
    config = loading.read_config(folder)
    model_type = config.get("model_type")
    if model_type not in MODELS:
        raise ValueError(f"{folder}: model_type {model_type!r} is not here; these are: {', '.join(MODELS)}")
    model_class = MODELS[model_type]
    options = model_class.Config.from_hf(config)
    weights = loading.language_weights(loading.read_weights(folder, progress=progress))
    if options.tie_word_embeddings:
        embedding, head = (model_class.checkpoint_name(f"{name}.weight") for name in ("embed_tokens", "lm_head"))
        if loading.is_tied(weights, embedding, head):
            weights.pop(head, None)
        else:
            options = dataclasses.replace(options, tie_word_embeddings=False)
    return loading.build(lambda: model_class(options), weights, name_of=model_class.checkpoint_name)


__all__ = ["MODELS", "LanguageModel", "load"]
