"""Keys and values: where they lie, who sees them, how keys move, and layers under a traced index."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rcache
from tests import small


def test_pages_of_all_layers_are_one_pool():
    """Reshaped for free, the pool holds page `p` of layer row `l` at number `l * P + p`, as kernels want it."""
    cache, forward, _, _, visible = small.run(small.used(), 5, small.batch([1, 2], [4, 6]))
    for group in small.CONFIG.kv_groups:
        page_table = cache.table.page_tables[group.page_group]
        num_pages = small.CONFIG.capacity.pages[group.page_group]
        for layer_row, layer in enumerate(group.layers):
            got_keys, got_values, mask = (np.asarray(array) for array in visible[layer])
            for row, (sequence, last) in enumerate([(1, 3), (2, 5)]):
                end = int(forward.starts[row] + forward.lengths[row])
                begin = 0 if group.attention.sliding_window is None else end - group.attention.sliding_window
                seen = np.arange(begin, end)
                pages = layer_row * num_pages + np.asarray(page_table.pages)[sequence, seen // small.CONFIG.page_size]
                for buffer, got in ((cache.keys, got_keys), (cache.values, got_values)):
                    heads, layers, _, page_size, size = buffer[group.key].shape
                    pool = np.asarray(buffer[group.key].reshape(heads, layers * num_pages, page_size, size))
                    tokens = pool[:, pages, seen % page_size].swapaxes(0, 1)
                    assert tokens.any()
                    np.testing.assert_array_equal(got[row][mask[row, last]], tokens)


def test_bidirectional_blocks():
    """Tokens of a block see each other, in both directions; all else stays causal and within the window."""
    blocks = [-1, 0, 0, 0, 7, 7]
    _, forward, _, _, visible = small.run(small.used(), 6, small.batch([1], [5], bidirectional=[blocks]))
    start = int(forward.starts[0])
    for layer, window in ((1, 99), (2, 4)):
        keys, _, mask = visible[layer]
        counts = np.asarray(mask[0].sum(-1))
        query = np.arange(start, start + 5)[:, None]
        key = np.arange(start + 5)[None, :]
        block = np.array([-1] * start + blocks[:5])
        expected = (key <= query) & (key > query - window)
        expected |= (block[query] == block[key]) & (block[query] >= 0)
        np.testing.assert_array_equal(counts[:5], expected.sum(-1))
        assert counts[5] == 0  # padding
        # The columns are positions, from the first page that is read on.
        first = int(forward.pages[small.CONFIG.kv_groups[layer - 1].page_group].context_start[0])
        width = keys.shape[1]
        np.testing.assert_array_equal(
            np.asarray(mask[0, :5]), np.pad(expected[:, first:], ((0, 0), (0, width)))[:, :width]
        )


def rotated(keys, position, *, frequencies, interleaved):
    """RoPE as the paper writes it, pair by pair, in float64."""
    turned = keys.astype(np.float64)
    n = len(frequencies)
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        turned[..., a], turned[..., b] = (
            keys[..., a] * cos - keys[..., b] * sin,
            keys[..., a] * sin + keys[..., b] * cos,
        )
    return turned


@pytest.mark.parametrize(
    ("shift", "frequencies"),
    [
        (rcache.RopeShift(), 10000.0 ** -(np.arange(4) / 4)),
        (rcache.RopeShift(theta=500.0, rotary_dim=4), 500.0 ** -(np.arange(2) / 2)),
        (rcache.RopeShift(interleaved=True), 10000.0 ** -(np.arange(4) / 4)),
        (rcache.RopeShift(rotary_dim=6, interleaved=True, scaling=4.0), 10000.0 ** -(np.arange(3) / 3) / 4),
        (rcache.RopeShift(inverse_frequencies=(0.7, 0.01)), (0.7, 0.01)),
    ],
    ids=["full", "partial", "interleaved", "partial, interleaved, scaled", "frequencies given"],
)
def test_rope_shift_is_the_rotation_at_the_new_position(shift, frequencies):
    keys = np.random.default_rng(0).normal(size=(5, 2, 8)).astype(np.float32)
    at = functools.partial(rotated, keys, frequencies=np.asarray(frequencies), interleaved=shift.interleaved)
    move = jax.jit(lambda keys, offset: shift(keys, offset, 0))
    for offset in (-9, -1, 0, 6):
        moved = np.asarray(move(at(20).astype(np.float32), jnp.int32(offset)))
        np.testing.assert_allclose(moved, at(20 + offset), atol=1e-5)
        assert (np.abs(moved - at(20)).max() > 1e-2) == (offset != 0)  # and it did move


@pytest.mark.parametrize("shift", [rcache.RopeShift(rotary_dim=4), rcache.no_shift])
def test_shifts_keep_the_dtype_and_what_is_not_rotated(shift):
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 8)), jnp.bfloat16)
    moved = shift(keys, jnp.int32(-3), 0)
    assert moved.dtype == keys.dtype and bool(jnp.all(moved[..., 4:] == keys[..., 4:]))
    assert bool(jnp.all(moved == keys)) == (shift is rcache.no_shift)


def one_layer(cache, forward, layer, x):
    """All four payload operations on one of the equal layers. x: f32[B, T, 1, 4]."""
    like = small.EQUAL_LAYERS[0]
    state = rcache.read_state(cache, forward, layer, like=like)["conv"]
    new = {"conv": state + x[:, 0, 0, :2][:, None]}
    captured = {"conv": -new["conv"][:, None]}
    cache = rcache.update_state(cache, forward, layer, new, captured=captured, like=like)
    cache = rcache.put(cache, forward, layer, x, 2 * x[..., :2], like=like)
    return cache, (state, *rcache.get(cache, forward, layer, like=like))


def test_a_scan_over_equal_layers_is_the_loop_over_them():
    cache, forward = small.planned()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *forward.token_mask.shape, 1, 4)), jnp.float32)

    @jax.jit
    def scanned(cache, forward, x):
        layers = jnp.asarray(small.EQUAL_LAYERS, jnp.int32)
        return jax.lax.scan(lambda cache, inputs: one_layer(cache, forward, *inputs), cache, (layers, x))

    looped, seen = cache, []
    for i, layer in enumerate(small.EQUAL_LAYERS):
        looped, one = one_layer(looped, forward, layer, x[i])
        seen.append(one)
    assert not np.array_equal(seen[0][0], seen[1][0])  # the layers do differ in what they hold
    got, got_seen = scanned(cache, forward, x)
    small.same_tree("cache", got, looped)
    small.same_tree("seen", got_seen, jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen))


@pytest.mark.parametrize("read", [rcache.get, rcache.read_state])
def test_a_traced_layer_among_different_ones_needs_like(read):
    cache, forward = small.planned()
    with pytest.raises(ValueError, match="like="):
        jax.eval_shape(lambda layer: read(cache, forward, layer), jnp.int32(2))


flat_batch = jax.jit(rcache.flat_batch, static_argnames=("num_rows", "num_tokens"))


def test_flat_batch_finds_rows_and_columns():
    """Tokens of interleaved sequences, padding between them: rows in order of first appearance."""
    sequences = [2, 0, -1, 2, 3, 0, 2, -1]
    positions = [4, -1, -1, 5, 0, -1, 6, -1]
    batch, rows, columns = flat_batch(np.array(sequences), np.array(positions), num_rows=4, num_tokens=3)
    assert batch.status == rcache.Status.OK
    assert batch.sequences.tolist() == [2, 0, 3, -1]
    assert batch.lengths.tolist() == [3, 2, 1, 0]
    assert batch.positions.tolist() == [[4, 5, 6], [-1, -1, -1], [0, -1, -1], [-1, -1, -1]]
    assert rows.tolist() == [0, 1, 4, 0, 2, 1, 0, 4]  # padding: num_rows
    assert np.asarray(columns)[np.array(sequences) >= 0].tolist() == [0, 0, 1, 0, 1, 2]
    grid = jnp.zeros((4, 3), jnp.int32).at[rows, columns].set(jnp.arange(10, 18, dtype=jnp.int32), mode="drop")
    assert grid.tolist() == [[10, 13, 16], [11, 15, 0], [14, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "sequences", [[0, 1, 2, 3, 0], [1, 1, 0, 1, 1]], ids=["more sequences than rows", "more tokens than columns"]
)
def test_flat_batch_of_more_than_planned(sequences):
    batch, _, _ = flat_batch(np.array(sequences), np.full(5, -1), num_rows=3, num_tokens=3)
    assert batch.status == rcache.Status.BATCH_TOO_LARGE
