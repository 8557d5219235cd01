"""Options of models, read from Hugging Face's `config.json`: the fields of a config are named as they are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self


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
        required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
        if missing := sorted(required - set(given)):
            raise ValueError(f"missing config options: {', '.join(missing)}")
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

    def has(self, layer_type: str) -> bool:
        """Whether a layer is of this type. The options of others do not matter, and may be nonsense."""
        return layer_type in self.layer_types

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
