"""Why an operation refused: a value in its result, never an exception inside a compiled function."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class Status(enum.IntEnum):
    """Outcome of an operation. Anything but OK: the cache returned is the cache given."""

    OK = 0
    BATCH_TOO_LARGE = 1
    SEQUENCE_OUT_OF_RANGE = 2
    DUPLICATE_SEQUENCE = 3
    LENGTH_OUT_OF_RANGE = 4
    POSITION_MISMATCH = 5
    CONTEXT_OVERFLOW = 6
    CAPTURES_INVALID = 7
    SLOTS_FULL = 8
    PAGES_FULL = 9
    RANGE_INVALID = 10
    NOT_RESTORABLE = 11

    @property
    def advice(self) -> str:
        """What happened and what to do about it."""
        return _ADVICE[self]


_ADVICE = {
    Status.OK: "nothing went wrong",
    Status.BATCH_TOO_LARGE: "a flat batch has more sequences, or more tokens of one, than it was planned for: "
    "raise num_rows or num_tokens, or split it",
    Status.SEQUENCE_OUT_OF_RANGE: "a sequence id is not in 0 .. max_sequences - 1 (a padding row is -1)",
    Status.DUPLICATE_SEQUENCE: "two rows of the batch belong to one sequence: put its tokens in one row",
    Status.LENGTH_OUT_OF_RANGE: "a row's length is negative or more than the batch's T",
    Status.POSITION_MISMATCH: "given positions do not continue the sequence: positions follow from its length; "
    "remove what they would overwrite, or leave positions out",
    Status.CONTEXT_OVERFLOW: "a sequence would outgrow context_length, or the context this pass was compiled for",
    Status.CAPTURES_INVALID: "capture offsets must ascend within 1 .. the row's length; -1 fills the rest",
    Status.SLOTS_FULL: "no state slot is free, and no checkpoint is left to give up: remove a sequence, "
    "or raise num_slots",
    Status.PAGES_FULL: "no page is free: remove a sequence, or raise num_pages",
    Status.RANGE_INVALID: "begin, end or length lies outside the sequence, or end before begin",
    Status.NOT_RESTORABLE: "the state at that length was not kept: ask prepare_restore which length was",
}


class CacheError(RuntimeError):
    """An operation refused; `status` says why."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status.name}: {status.advice}")
        self.status = status


def raise_if_error(status: jax.Array | int) -> None:
    """Raises `CacheError` on the host unless `status` (i32[], concrete) is OK."""
    outcome = Status(int(status))
    if outcome is not Status.OK:
        raise CacheError(outcome)


def first_error(*checks: tuple[jax.Array, Status]) -> jax.Array:
    """The status of the first check (failed: bool[], status) that failed, else OK: i32[]."""
    outcome = jnp.int32(Status.OK)
    for failed, status in reversed(checks):
        outcome = jnp.where(failed, jnp.int32(status), outcome)
    return outcome
