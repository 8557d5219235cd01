"""What a hybrid language model remembers between forward passes, as an immutable value. See README.md."""

from rcache.batch import Batch, flat_batch, make_batch
from rcache.cache import (
    Cache,
    abstract,
    approximate,
    checkpoint_approximate,
    checkpoint_positions,
    counters,
    free_pages,
    free_slots,
    init,
    lengths,
    slots,
)
from rcache.config import Attention, CheckpointPolicy, Config, Layer, MemoryReport, State
from rcache.forward import Forward, start_forward
from rcache.kv import get, put
from rcache.reserve import StepMemory, reserve
from rcache.run import Run, finish_run, run_token, start_run
from rcache.sequences import can_resume, copy_prefix, prepare_restore, remove, remove_exact, reorder, reset
from rcache.shift import RopeShift, no_shift
from rcache.states import ensure_writable, read_state, update_state
from rcache.status import CacheError, Status, raise_if_error
from rcache.steps import step_state
from rcache.table import Counters

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Batch",
    "Cache",
    "CacheError",
    "CheckpointPolicy",
    "Config",
    "Counters",
    "Forward",
    "Layer",
    "MemoryReport",
    "RopeShift",
    "Run",
    "State",
    "Status",
    "StepMemory",
    "abstract",
    "approximate",
    "can_resume",
    "checkpoint_approximate",
    "checkpoint_positions",
    "copy_prefix",
    "counters",
    "ensure_writable",
    "finish_run",
    "flat_batch",
    "free_pages",
    "free_slots",
    "get",
    "init",
    "lengths",
    "make_batch",
    "no_shift",
    "prepare_restore",
    "put",
    "raise_if_error",
    "read_state",
    "remove",
    "remove_exact",
    "reorder",
    "reserve",
    "reset",
    "run_token",
    "slots",
    "start_forward",
    "start_run",
    "step_state",
    "update_state",
]
