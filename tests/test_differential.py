"""Random sessions: the JAX operations and the NumPy reference agree on everything, after every operation.

RCACHE_RANDOM_OPERATIONS sets how many operations are tried altogether (1600 by default).
"""

import os

import hypothesis
import pytest
from hypothesis import Phase, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import rcache
from tests.differential import NUM_CAPTURES, NUM_TOKENS, Pair

NUM_OPERATIONS = int(os.environ.get("RCACHE_RANDOM_OPERATIONS", "1600"))
STEPS = 50
POLICY = rcache.CheckpointPolicy(count=3, min_position=2, interval=3)

conv = {"conv": rcache.State((3, 2))}
both = conv | {"ssm": rcache.State((2, 2))}
full = rcache.Attention(2, 3)
window = rcache.Attention(1, 2, value_dim=3, sliding_window=4)
CONFIGS = {
    "hybrid": rcache.Config(
        (rcache.Layer(both), rcache.Layer(attention=full), rcache.Layer(conv)), 4, 40, page_size=1, checkpoints=POLICY
    ),
    "hybrid, little room": rcache.Config(
        (rcache.Layer(both), rcache.Layer(attention=full)), 4, 40, page_size=4, checkpoints=POLICY,
        num_slots=7, num_pages=14,
    ),
    "hybrid with window": rcache.Config(
        (rcache.Layer(both, full), rcache.Layer(attention=window), rcache.Layer(conv)), 4, 40, page_size=3,
        checkpoints=POLICY, max_pass_tokens=NUM_TOKENS,
    ),
    "hybrid with window, little room": rcache.Config(
        (rcache.Layer(conv, window),), 4, 40, page_size=2, checkpoints=POLICY, num_slots=9, num_pages=16
    ),
    "no checkpoints": rcache.Config(
        (rcache.Layer(conv), rcache.Layer(attention=window)), 4, 40, page_size=4, num_slots=3,
        checkpoints=rcache.CheckpointPolicy(count=0),
    ),
    "one checkpoint": rcache.Config(
        (rcache.Layer(both),), 4, 40, num_slots=6, checkpoints=rcache.CheckpointPolicy(1, 0, 12)
    ),
    "hybrid with a window of one": rcache.Config(
        (rcache.Layer(conv, rcache.Attention(1, 2, sliding_window=1)),), 4, 40, page_size=2, checkpoints=POLICY
    ),
    "attention only": rcache.Config(
        (
            rcache.Layer(attention=full),
            rcache.Layer(attention=rcache.Attention(1, 2, sliding_window=4, memory=9)),
            rcache.Layer(attention=rcache.Attention(1, 2, chunk_size=5)),
            rcache.Layer(attention=rcache.Attention(1, 2, chunk_size=4, memory=7)),
        ), 4, 40, page_size=4, num_pages=(24, 14, 24, 14),
    ),
}  # fmt: skip

sequences = st.integers(-1, 4)
usual = st.integers(0, 3)
fractions = st.integers(-1, 42)


class Session(RuleBasedStateMachine):
    """Operations drawn at random; `Pair` fails where the two sides differ."""

    config = CONFIGS["hybrid"]
    contexts = (None,)

    @initialize()
    def begin(self):
        self.pair = Pair(self.config)

    @rule(data=st.data())
    def forward(self, data):
        rows = data.draw(st.lists(usual, min_size=1, max_size=4, unique=True))
        tokens = [data.draw(st.lists(st.integers(0, 97), max_size=NUM_TOKENS)) for _ in rows]
        captures = None
        if data.draw(st.booleans()):
            offsets = st.sets(st.integers(1, NUM_TOKENS), max_size=NUM_CAPTURES)
            captures = [sorted(o for o in data.draw(offsets) if o <= len(row)) for row in tokens]
        positions = [[self.pair.length(s) + i for i in range(len(row))] for s, row in zip(rows, tokens, strict=True)]
        self.pair.forward(
            list(zip(rows, tokens, strict=True)),
            positions=data.draw(st.sampled_from([None, positions])),
            captures=captures,
            bidirectional=data.draw(st.sampled_from([None, [[-1, 0, 0, 1, 1, 1]] * len(rows)])),
            context=data.draw(st.sampled_from(self.contexts)),
        )

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, 97), min_size=1, max_size=NUM_TOKENS))
    def decode(self, sequence, tokens):
        for token in tokens:
            self.pair.forward([(sequence, [token])])

    @rule(data=st.data())
    def run(self, data):
        rows = data.draw(st.lists(usual, min_size=1, max_size=4, unique=True))
        tokens = [data.draw(st.lists(st.integers(0, 97), max_size=NUM_TOKENS)) for _ in rows]
        planned = [len(row) + data.draw(st.integers(0, NUM_TOKENS - len(row))) for row in tokens]
        self.pair.run(list(zip(rows, tokens, strict=True)), planned, data.draw(st.sampled_from(self.contexts)))

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 97), min_size=1, max_size=NUM_TOKENS))
    def wrong_forward(self, data, tokens):
        rows = data.draw(st.lists(sequences, min_size=1, max_size=4))
        numbers = st.lists(st.integers(-2, 8), max_size=NUM_CAPTURES)
        self.pair.forward(
            [(sequence, tokens) for sequence in rows],
            lengths=[data.draw(st.integers(-1, NUM_TOKENS + 1)) for _ in rows],
            positions=[data.draw(numbers) for _ in rows],
            captures=[data.draw(numbers) for _ in rows],
        )

    @rule(src=usual, dst=usual, part=fractions)
    def fork(self, src, dst, part):
        self.pair.copy_prefix(src, dst, min(part, self.pair.length(src)))

    @rule(src=sequences, dst=sequences, length=fractions)
    def copy_prefix(self, src, dst, length):
        self.pair.copy_prefix(src, dst, length)

    @rule(sequence=sequences, length=fractions)
    def roll_back(self, sequence, length):
        self.pair.ask(sequence, length)
        self.pair.remove(sequence, self.pair.reference.prepare_restore(sequence, length))

    @rule(sequence=sequences, begin=fractions)
    def remove_tail(self, sequence, begin):
        self.pair.remove(sequence, begin)

    @rule(sequence=sequences, begin=fractions, size=st.integers(-1, 9))
    def remove_middle(self, sequence, begin, size):
        self.pair.remove(sequence, begin, begin + size)

    @rule(sequence=sequences, begin=fractions, size=st.integers(-1, 9))
    def remove_exact(self, sequence, begin, size):
        self.pair.remove_exact(sequence, begin, begin + size)

    @rule(sources=st.lists(sequences, min_size=4, max_size=4))
    def reorder(self, sources):
        self.pair.reorder(sources)

    @rule(sequence=sequences, position=fractions)
    def ask(self, sequence, position):
        self.pair.ask(sequence, position)

    @rule(really=st.integers(0, 9))
    def reset(self, really):
        if really == 0:
            self.pair.reset()


@pytest.mark.parametrize("name", CONFIGS)
def test_random_sessions(name):
    machine = type(
        "Session", (Session,), {"config": CONFIGS[name], "contexts": (None, 20) if name == "hybrid" else (None,)}
    )
    settings = hypothesis.settings(
        max_examples=-(-NUM_OPERATIONS // (STEPS * len(CONFIGS))),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize=NUM_OPERATIONS <= 3000,
        database=None,
        phases=[Phase.generate],  # a whole failing session is printed; making it small takes longer than reading it
    )
    run_state_machine_as_test(machine, settings=settings)
