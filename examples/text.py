"""Text to tokens and back, and how a conversation is written down for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


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
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

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
      first_token: the conversation's first token; None: none.
    """

    def __init__(self, tokenizer: Tokenizer, first_token: int | None) -> None:
        chat_ml = isinstance(tokenizer, FileTokenizer) and tokenizer.has("<|im_start|>")
        self._encode = tokenizer.encode
        self._begin, self._end = ("<|im_start|>{role}\n", "<|im_end|>\n") if chat_ml else ("{role}: ", "\n")
        self.start = [] if first_token is None else [first_token]

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
