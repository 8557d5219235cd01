"""Text to tokens and back, where texts begin and end, and how a conversation is written down for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from models.loading import read_json


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """A token is a byte of UTF-8: for models without a tokenizer, of a vocabulary of 256 or more."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are no text, and tokens that are no bytes, are shown as `\\xff` or `<300>`."""
        pieces, pending = [], bytearray()
        for token in [*tokens, None]:
            if token is not None and token < 256:
                pending.append(token)
                continue
            pieces.append(pending.decode("utf-8", "backslashreplace"))
            pieces.append("" if token is None else f"<{token}>")
            pending.clear()
        return "".join(pieces)


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"{path} needs the package `tokenizers`: pip install 'rcache[examples]'") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package has no narrower one
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # both are stored in the file, for training
        self._tokenizer.no_padding()

    @property
    def start(self) -> list[int]:
        """The special tokens that it is told to put before a text."""
        if not self.encode("a"):
            return []
        probe = self._tokenizer.encode("a", add_special_tokens=True)
        pairs = zip(probe.ids, probe.special_tokens_mask, strict=True)
        return [token for token, _ in takewhile(lambda pair: pair[1], pairs)]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def has(self, token: str) -> bool:
        return self._tokenizer.token_to_id(token) is not None


class Template:
    """How messages are written down, so that a conversation's tokens begin with those of the same one, shorter.

    Args:
      tokenizer: for the words around the messages. One that knows `<|im_start|>` gets ChatML; others plain lines.
      start: the conversation's first tokens, as of `start_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, start: Sequence[int]) -> None:
        chat_ml = isinstance(tokenizer, FileTokenizer) and tokenizer.has("<|im_start|>")
        self._encode = tokenizer.encode
        self._begin, self._end = ("<|im_start|>{role}\n", "<|im_end|>\n") if chat_ml else ("{role}: ", "\n")
        self.start = list(start)

    def begin(self, role: str) -> list[int]:
        """What stands before a message of `role`."""
        return self._encode(self._begin.format(role=role))

    def end(self) -> list[int]:
        """What stands behind a message."""
        return self._encode(self._end)

    def question(self, text: str) -> list[int]:
        return [*self.begin("user"), *self._encode(text), *self.end()]


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model's folder, bytes if it has none."""
    path = Path(folder) / "tokenizer.json"
    if path.is_file():
        return FileTokenizer(path)
    if vocab_size < 256:
        raise ValueError(f"{folder} has no tokenizer.json, and a vocabulary of {vocab_size} is too small for bytes")
    return ByteTokenizer()


def language_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with the options of the language model on top, where it has others beside it."""
    inner = config.get("text_config") or {}
    return {**config, **{name: value for name, value in inner.items() if value is not None}}


def start_tokens(folder: str | Path, tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    """What stands before every text: the BOS token, or nothing. Bytes have none.

    A `bos_token_id` in the config does not mean that texts begin with it (Qwen's do not), so the tokenizer's files are
    asked first: what `tokenizer.json` puts before a text, else `add_bos_token` of `tokenizer_config.json`, which is
    false if left out. Only where there is no such file does the config decide.

    Args:
      folder: the model's.
      tokenizer: as of `load_tokenizer`.
      options: as of `language_options`.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return []
    first = options.get("bos_token_id")
    if tokenizer.start or first is None:
        return tokenizer.start
    path = Path(folder) / "tokenizer_config.json"
    return [first] if not path.is_file() or read_json(path).get("add_bos_token") else []


def stop_tokens(folder: str | Path, options: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: the EOS tokens of the config (`language_options`) and `generation_config.json`."""
    path = Path(folder) / "generation_config.json"
    stops: set[int] = set()
    for source in (options, read_json(path) if path.is_file() else {}):
        given = source.get("eos_token_id")
        stops.update(given if isinstance(given, list) else [] if given is None else [given])
    return tuple(sorted(stops))


def escaped(text: str, keep: str = "") -> str:
    """`text` with everything that is not printable as an escape, but for the characters in `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
