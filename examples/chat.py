"""Conversations over one cache: `python examples/chat.py [--model DIR] [--interactive]`

Two users talk to a model, one of them in two branches and with an edited question. Everything is in one cache. A turn
runs only the tokens that are new since the longest prefix whose state was kept; for each, a line says what was reused,
what it was restored from, and what had to run. At the end every answer is checked against a run from an empty cache:
the same tokens, or exit code 1.

The default model is a small Qwen3.5 over bytes that `train.py` made. It answers in sentences, and knows of nothing but
Alice's Adventures in Wonderland and As You Like It.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import decoding
import models
import rcache
from models import loading
from text import Template, escaped, language_options, load_tokenizer, start_tokens, stop_tokens

DEFAULT_MODEL = Path(__file__).resolve().parent / "data" / "wonderland"
NUM_ROWS = 2  # users that are answered at once
NUM_CAPTURES = 2
MAX_SEQUENCES = 8
BUCKETS = (32,)  # tokens of a pass; longer prompts take several
TOLERANCE = 1e-4  # of logits, between a run over what was reused and a run from the beginning


@dataclass
class Conversation:
    """What was said, as tokens, and the sequence that stands for it. The cache may hold less, or something else."""

    name: str
    sequence: int
    messages: list[list[int]] = field(default_factory=list)  # question, answer, question, ...
    origin: str = ""  # of a branch that was not asked anything yet: what it was copied from

    def retract(self, num_exchanges: int = 1) -> None:
        """Takes back the last questions and their answers. The cache hears of it when the next question comes."""
        del self.messages[max(0, len(self.messages) - 2 * num_exchanges) :]


@dataclass(frozen=True)
class Turn:
    """One answered question, and what it took."""

    name: str
    sequence: int
    prompt: list[int]
    answer: list[int]  # the stop token included
    logits: np.ndarray  # f32[V], after the prompt
    seed: int
    held: int  # tokens the sequence had
    common: int  # of them, the prompt begins with
    reused: int  # of those, whose state was kept
    origin: str

    @property
    def run(self) -> int:
        return len(self.prompt) - self.reused

    @property
    def resumed(self) -> str:
        if self.origin:
            return self.origin
        if self.reused == 0:
            return "nothing to go on from"
        if self.reused == self.held:
            return "where it was"
        return f"restored to a checkpoint ({self.common} of {self.held} tokens in common)"


class Chat:
    """A model, a cache for `MAX_SEQUENCES` sequences, and the tokens that each of them holds."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        config = language_options(loading.read_config(folder))
        model = models.load(folder)
        self.model = decoding.split(model)
        self.tokenizer = load_tokenizer(folder, config["vocab_size"])
        self.template = Template(self.tokenizer, start_tokens(folder, self.tokenizer, config))
        self.stop_tokens = stop_tokens(folder, config)
        self.max_new_tokens = options.max_new_tokens
        self.sampling = decoding.Sampling(options.temperature, options.top_k, options.top_p)
        self.seed = options.seed
        self.config = rcache.Config(
            model.cache_layers(),
            max_sequences=MAX_SEQUENCES,
            context_length=options.context_length,
            checkpoints=rcache.CheckpointPolicy(count=16, min_position=8, interval=64),
        )
        self.cache = rcache.init(self.config)
        self.held: list[list[int]] = [[] for _ in range(MAX_SEQUENCES)]
        self.turns: list[Turn] = []
        self.num_conversations = 0

    def open(self, name: str) -> Conversation:
        """A new conversation, in a sequence of its own."""
        if self.num_conversations == MAX_SEQUENCES:
            raise ValueError(f"all {MAX_SEQUENCES} sequences are taken")
        self.num_conversations += 1
        return Conversation(name, self.num_conversations - 1)

    def ask(self, *questions: tuple[Conversation, str]) -> list[Turn]:
        """Asks up to `NUM_ROWS` conversations a question each, and answers them in one batch."""
        prompts, borders = [], []
        for conversation, text in questions:
            history = self.tokens_of(conversation)
            question = self.template.question(text)
            borders.append(len(history))
            prompts.append([*history, *question, *self.template.begin("assistant")])
            if len(prompts[-1]) + self.max_new_tokens > self.config.context_length:
                raise ValueError(f"{conversation.name} has outgrown the context of {self.config.context_length} tokens")
        sequences = [conversation.sequence for conversation, _ in questions]
        held = [len(self.held[sequence]) for sequence in sequences]
        common = [common_prefix(self.held[s], prompt) for s, prompt in zip(sequences, prompts, strict=True)]
        reused = [self.resume(s, prompt) for s, prompt in zip(sequences, prompts, strict=True)]
        seeds = [self.seed + len(self.turns) + row for row in range(len(questions))]
        began = time.perf_counter()
        # An edited question, or another branch, will go on from where the question begins; the same prompt, again,
        # from one token before its end.
        captures = [(border, len(prompt) - 1) for border, prompt in zip(borders, prompts, strict=True)]
        self.cache, logits, answers, prefilled = self.complete(self.cache, sequences, prompts, reused, seeds, captures)
        ended = time.perf_counter()
        turns = []
        for row, (conversation, text) in enumerate(questions):
            prompt, answer = prompts[row], answers[row]
            self.held[sequences[row]] = [*prompt, *answer[:-1]]  # the last token was chosen, and not run
            spoken = answer[:-1] if answer[-1] in self.stop_tokens else answer
            conversation.messages += [self.template.question(text), spoken]
            turns.append(
                Turn(
                    name=conversation.name,
                    sequence=sequences[row],
                    prompt=prompt,
                    answer=answer,
                    logits=logits[row],
                    seed=seeds[row],
                    held=held[row],
                    common=common[row],
                    reused=reused[row],
                    origin=conversation.origin,
                )
            )
            conversation.origin = ""
        self.turns += turns
        self.show(turns, prefilled - began, ended - prefilled)
        return turns

    def tokens_of(self, conversation: Conversation) -> list[int]:
        """All that was said, as the beginning of a prompt."""
        tokens = list(self.template.start)
        for index, message in enumerate(conversation.messages):
            is_answer = index % 2 == 1
            tokens += [*self.template.begin("assistant"), *message, *self.template.end()] if is_answer else message
        return tokens

    def resume(self, sequence: int, prompt: Sequence[int]) -> int:
        """Cuts a sequence to the longest prefix of `prompt` that can be resumed, and leaves a token to run: its length.

        At least one token has to run, since logits are not kept.
        """
        target = min(common_prefix(self.held[sequence], prompt), len(prompt) - 1)
        resumed = int(rcache.prepare_restore(self.cache, sequence, target))
        self.cache, status = rcache.remove(self.cache, sequence, resumed)
        rcache.raise_if_error(status)
        return resumed

    def branch(self, source: Conversation, name: str, num_exchanges: int) -> Conversation:
        """A conversation that begins with the first exchanges of another, in a sequence of its own."""
        branch = self.open(name)
        branch.messages = source.messages[: 2 * num_exchanges]
        held = self.held[source.sequence]
        length = common_prefix(held, self.tokens_of(branch))
        self.cache, got, status = rcache.copy_prefix(self.cache, source.sequence, branch.sequence, length)
        rcache.raise_if_error(status)
        self.held[branch.sequence] = held[: int(got)]
        branch.origin = f"copied {int(got)} of {len(held)} tokens of {source.name}"
        return branch

    def complete(
        self,
        cache: rcache.Cache,
        sequences: Sequence[int],
        prompts: Sequence[list[int]],
        begins: Sequence[int],
        seeds: Sequence[int],
        captures: Sequence[Sequence[int]] = (),
    ) -> tuple[rcache.Cache, np.ndarray, list[list[int]], float]:
        """Runs each prompt from token `begins[b]` on, and answers it, keeping the states after `captures[b]` tokens.

        Passes are always of `NUM_ROWS` rows, with room for `NUM_CAPTURES`, so that few shapes are compiled.

        Returns the cache, the logits after each prompt f32[B, V], the answers, and when the prompts were through.
        """
        padding = NUM_ROWS - len(sequences)
        cache, logits, status = decoding.prefill(
            self.model,
            cache,
            [prompt[begin:] for prompt, begin in zip(prompts, begins, strict=True)],
            sequences,
            num_rows=NUM_ROWS,
            buckets=BUCKETS,
            captures=[
                [offset - begin for offset in offsets]
                for offsets, begin in zip(captures or [()] * len(prompts), begins, strict=True)
            ],
            num_captures=NUM_CAPTURES,
        )
        rcache.raise_if_error(status)
        jax.block_until_ready(logits)
        prefilled = time.perf_counter()
        cache, generated, status = decoding.generate(
            self.model,
            cache,
            jnp.array([*sequences, *[-1] * padding], jnp.int32),
            logits,
            max_new_tokens=self.max_new_tokens,
            stop_tokens=self.stop_tokens,
            sampling=self.sampling,
            keys=jax.vmap(jax.random.key)(jnp.array([*seeds, *[0] * padding], jnp.uint32)),
        )
        rcache.raise_if_error(status)
        tokens, lengths = np.asarray(generated.tokens), np.asarray(generated.lengths)
        answers = [tokens[row, : lengths[row]].tolist() for row in range(len(sequences))]
        return cache, np.asarray(logits), answers, prefilled

    def warm_up(self) -> float:
        """Compiles every shape, on a cache of its own: seconds."""
        began = time.perf_counter()
        for length in BUCKETS:
            self.complete(rcache.init(self.config), [0], [[0] * length], [0], [0])
        return time.perf_counter() - began

    def show(self, turns: Sequence[Turn], prefill_seconds: float, decode_seconds: float) -> None:
        """What the turns took: those of one batch share its seconds."""
        num_run = sum(turn.run for turn in turns)
        num_new = sum(len(turn.answer) for turn in turns)
        speed = f"{num_run / prefill_seconds:,.0f} tokens/s in, {num_new / decode_seconds:,.0f} tokens/s out"
        for index, turn in enumerate(turns):
            number = len(self.turns) - len(turns) + index + 1
            print(
                f"{number:>4}  {turn.name:<12} {turn.sequence:>3}  {len(turn.prompt):>6} {turn.reused:>7} {turn.run:>5}"
                f" {len(turn.answer):>5}  {turn.resumed}"
            )
            print(f"      {escaped(self.tokenizer.decode(turn.answer))}")
        print(f"      {speed}{' (both together)' if len(turns) > 1 else ''}", flush=True)

    def check(self) -> bool:
        """Every answer again, each from a cache that is empty: whether all are token for token the same."""
        print(f"\nThe same {len(self.turns)} prompts, each from an empty cache:")
        all_equal = True
        for number, turn in enumerate(self.turns, 1):
            _, logits, [answer], _ = self.complete(rcache.init(self.config), [0], [turn.prompt], [0], [turn.seed])
            difference = float(np.max(np.abs(logits[0] - turn.logits)))
            equal = answer == turn.answer and difference <= TOLERANCE
            all_equal &= equal
            verdict = f"{len(answer)} tokens equal" if answer == turn.answer else self.where_apart(turn, answer)
            # How far off they would be, had the turn gone on from another state: without this, "close" says nothing.
            others = [np.max(np.abs(logits[0] - t.logits)) for t in self.turns if t.prompt != turn.prompt]
            nearest = f" (those of other prompts: {min(others):.1e})" if others else ""
            mark = "" if equal else "  NO"
            print(f"{number:>4}  {turn.name:<12} {verdict}, logits within {difference:.1e}{nearest}{mark}")
        print("All answers are those of a cold run." if all_equal else "NOT all answers are those of a cold run.")
        return all_equal

    def where_apart(self, turn: Turn, answer: list[int]) -> str:
        """Where an answer leaves that of the cold run, and how close a call it was there."""
        place = common_prefix(turn.answer, answer)
        prompt = [*turn.prompt, *answer[:place]]
        _, logits, _, _ = self.complete(rcache.init(self.config), [0], [prompt], [0], [turn.seed])
        second, first = np.sort(logits[0])[-2:]
        return (
            f"differs at token {place + 1} of {len(answer)}, where the best two logits are {first - second:.1e} apart"
        )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def scripted(chat: Chat) -> None:
    """Two users, a branch, an edited question, and the same question again."""
    ada, bo = chat.open("Ada"), chat.open("Bo")
    print("Two users begin, in one batch.")
    chat.ask((ada, "What sort of people live about here?"), (bo, "How old are you, friend?"))
    print("Each goes on: only what is new runs.")
    chat.ask((ada, "And how do you know that you're mad?"))
    chat.ask((ada, "Do you play croquet with the Queen to-day?"), (bo, "Wast born i' the forest here?"))
    print("Ada branches off after two exchanges, with another question: the third is left out.")
    branch = chat.branch(ada, "Ada's branch", 2)
    chat.ask((branch, "What day of the month is it?"))
    print("Both branches live on, in one batch.")
    chat.ask((ada, "Why is a raven like a writing-desk?"), (branch, "Have you guessed the riddle yet?"))
    print("Ada edits her second question: all behind it goes, down to the state before it.")
    ada.retract(3)
    chat.ask((ada, "And who are you?"))
    print("Bo wants another answer to the same question: one token has to run, for its logits.")
    bo.retract()
    chat.ask((bo, "Wast born i' the forest here?"))


COMMANDS = """\
/branch [N]   a branch of this conversation, after its first N exchanges (default: all)
/switch NAME  go on with another conversation
/undo         take back the last question and its answer
/list         the conversations
/quit         end; every answer is then checked against a cold run"""


def interactive(chat: Chat) -> None:
    """Reads questions and commands from standard input until it ends."""
    print(COMMANDS)
    current = chat.open("main")
    conversations = {current.name: current}
    while True:
        try:
            line = input(f"{current.name}> ").strip()
        except EOFError:
            return
        command, _, argument = line.partition(" ")
        try:
            if command == "/quit":
                return
            if command == "/branch":
                name = f"branch{len(conversations)}"
                num_exchanges = int(argument) if argument else len(current.messages) // 2
                current = conversations[name] = chat.branch(current, name, num_exchanges)
            elif command == "/switch":
                if argument not in conversations:
                    raise ValueError(f"no conversation {argument!r}: {', '.join(conversations)}")
                current = conversations[argument]
            elif command == "/undo":
                current.retract()
            elif command == "/list":
                for name, conversation in conversations.items():
                    print(f"{name}: {len(conversation.messages) // 2} exchanges, sequence {conversation.sequence}")
            elif command.startswith("/"):
                print(COMMANDS)
            elif line:
                chat.ask((current, line))
        except ValueError as error:
            print(error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Conversations over one cache, checked against cold runs.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--interactive", action="store_true", help="chat on standard input")
    parser.add_argument("--max-new-tokens", type=int, default=120, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--context-length", type=int, default=1024, help="tokens of a conversation (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.3, help="0: greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, help="sample from the likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from those of this probability together")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    options = parser.parse_args(arguments)
    if options.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    try:
        chat = Chat(options.model, options)
        print(f"{options.model.name}: compiled in {chat.warm_up():.1f} s\n")
        print(f"{'turn':>4}  {'user':<12} {'seq':>3}  {'prompt':>6} {'reused':>7} {'run':>5} {'new':>5}  resumed from")
        (interactive if options.interactive else scripted)(chat)
    except ValueError as error:
        parser.error(str(error))
    return 0 if chat.check() else 1


if __name__ == "__main__":
    sys.exit(main())
