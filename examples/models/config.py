"""Options of models, read from Hugging Face's `config.json`: the fields of a config are named as they are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every model has. A subclass adds the options that decide what is computed, with Hugging Face's defaults."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...] = ()
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """From the contents of `config.json`; what is not there, or null, has the default.

        Raises:
          ValueError: an option the model does not have here, or one that makes no sense.
        """
        config = cls.prepare(dict(config))
        names = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in config.items() if name in names and value is not None}
        options = cls(**{name: _frozen(value) for name, value in given.items()})
        unsupported = {
            "num_hidden_layers": len(options.layer_types) != options.num_hidden_layers,
            "quantization_config": bool(config.get("quantization_config")),
        } | options.unsupported()
        if found := [f"{name} = {config.get(name)!r}" for name, wrong in unsupported.items() if wrong]:
            raise ValueError(f"unsupported config options: {', '.join(found)}")
        return options

    @classmethod
    def prepare(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Brings a config of another version or form to the names of this class."""
        return config

    def unsupported(self) -> dict[str, bool]:
        """By name, whether an option has a value that is not implemented here or makes no sense."""
        return {}

    def layers_unlike(self, *layer_types: str) -> bool:
        """Whether a layer is of none of these types."""
        return bool(set(self.layer_types) - set(layer_types))


def current_layer_types(layer_types: Iterable[str]) -> list[str]:
    """The types of layers as configs name them today."""
    old_names = {"mamba": "linear_attention", "attention": "full_attention"}
    return [old_names.get(layer_type, layer_type) for layer_type in layer_types]


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, Mapping) and "__float__" in value:  # how infinity is written there
        return float(value["__float__"])
    return value


def rope_frequencies(
    config: Mapping[str, Any], head_dim: int, *, default_theta: float = 1e4, default_fraction: float = 1.0
) -> tuple[float, ...]:
    """Radians a token of each pair that RoPE turns in a head, from the options of a config, old and new.

    A fraction of a head is turned (`partial_rotary_factor`): there are `int(fraction * head_dim) / 2` frequencies.

    Raises:
      ValueError: a `rope_type` other than default and linear.
    """
    options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = options.get("rope_theta") or config.get("rope_theta") or default_theta
    rope_type = options.get("rope_type") or options.get("type") or "default"
    if rope_type not in ("default", "linear"):
        raise ValueError(f"unsupported config option: rope_type = {rope_type!r} (supported: 'default', 'linear')")
    fraction = options.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default_fraction
    rotary_dim = int(fraction * head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"unsupported config option: partial_rotary_factor = {fraction}, which is {rotary_dim} of {head_dim}: "
            "must be an even number"
        )
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    if rope_type == "linear":
        if "factor" not in options:
            raise ValueError(f"rope_type 'linear' needs a factor, got {options}")
        frequencies = frequencies / np.float32(options["factor"])
    return tuple(frequencies.tolist())
