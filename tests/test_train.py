"""The script that trains the model of the chat: its text, and that what it writes is a model that has learnt it."""

import io
import tarfile

import jax
import numpy as np
import pytest

import decoding
import models
import rcache
import train
from text import ByteTokenizer, Template

STORY = """THE TITLE

  Alice was beginning to get very tired.  `Which way?' she asked:  the
Cat (it grinned) said nothing.  So she
waited; no.

  `Come, we shall have some fun now!' thought Alice.
"""
PLAY = """AS YOU LIKE IT

ACT I

SCENE I\tOrchard of Oliver's house.

\t[Enter ORLANDO
\tand ADAM]

ORLANDO\tAs I remember, Adam, it was
\tupon this fashion.

ADAM\tYonder comes my master. [Exit]
"""


@pytest.fixture
def sdist(tmp_path):
    path = tmp_path / "brotli-1.2.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("alice29.txt", "\n" + STORY), ("asyoulik.txt", PLAY)):
            member = tarfile.TarInfo(f"brotli-1.2.0/tests/testdata/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_sentences_have_no_quotes_around_them_and_headings_are_none():
    assert train.sentences(STORY) == [
        "Alice was beginning to get very tired.",
        "Which way?",
        "She asked.",
        "The Cat (it grinned) said nothing.",
        "So she waited.",
        "Come, we shall have some fun now!",
        "Thought Alice.",
    ]


def test_of_a_play_what_is_spoken_is_left():
    assert train.sentences(train.spoken_lines(PLAY)) == [
        "As I remember, Adam, it was upon this fashion.",
        "Yonder comes my master.",
    ]


def test_text_is_a_conversation_as_the_chat_writes_it():
    lines = ["One two.", "Three?", "Four!"]
    text, starts = train.conversation(lines)
    template = Template(ByteTokenizer(), [])
    pairs = [(lines[0], lines[1]), (lines[1], lines[2])]
    first, second = (
        [*template.question(q), *template.begin("assistant"), *ByteTokenizer().encode(a), *template.end()]
        for q, a in pairs
    )
    assert text.tolist() == first + second
    assert starts.tolist() == [0, len(first)]
    assert template.end() == [train.CONFIG["eos_token_id"]]


def test_a_package_without_the_texts_is_refused(tmp_path):
    path = tmp_path / "other.tar.gz"
    tarfile.open(path, "w:gz").close()
    with pytest.raises(ValueError, match=r"does not contain alice29\.txt, asyoulik\.txt"):
        list(train.read_texts(path, (train.STORY, train.PLAY)))


def test_what_is_written_is_a_model_that_has_learnt_the_text(sdist, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "ROW_TOKENS", 48)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        assert train.main([str(sdist), str(tmp_path / "model"), "--steps", "60", "--rows", "4"]) == 0
    printed = capsys.readouterr().out
    assert "9 sentences" in printed and "nats a byte" in printed
    model = models.load(tmp_path / "model")
    config = rcache.Config(model.cache_layers(), max_sequences=1, context_length=64)
    prompt = list(b"user: As I remember, Adam, it was upon this fashion.\nassistant:")
    _, logits, status = decoding.prefill(decoding.split(model), rcache.init(config), [prompt], [0], buckets=(64,))
    rcache.raise_if_error(status)
    assert chr(int(np.argmax(logits[0]))) == " "
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 2e6
