"""What travels between router, scheduler and workers: frozen, data only, msgpack on the wire.

Columns that grow with the batch are little-endian int32 `bytes` (numpy's `tobytes` / `frombuffer`), so that a steady
batch costs the same few microseconds to send whatever its size.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from orcaserve.engine.sampling import SamplingParams

# "timeout": the deadline or the queue timeout passed before the first token. "error": see TokenDelta.error.
FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class GenerateRequest(msgspec.Struct, frozen=True):
    """One prompt and what to do with it. (prompt, sampling, ids so far) is all that anyone needs to continue it.

    `n` choices share the prompt's blocks and are numbered `choice_index`, `choice_index + 1`, ...; a resumed choice is
    a request of its own with `n` = 1, its old `choice_index` and the ids that it had in `output_token_ids`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: int = 0  # which delta stream (router replica) wants the tokens
    output_token_ids: tuple[int, ...] = ()
    n: int = 1
    choice_index: int = 0
    priority: int = 0  # lower is first
    tenant: str = ""
    cache_salt: str = ""  # requests share cached blocks only with the same tenant and salt
    deadline_s: float | None = None  # on the scheduler's clock, for the first token
    num_group_losses: int = 0  # groups that died while they ran this request


class NewSlot(msgspec.Struct, frozen=True, array_like=True):
    """A row of the running batch is taken: all that a worker must know of the request, sent once."""

    slot: int
    token_ids: bytes  # int32: prompt, then ids generated so far (after a preemption or a move)
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_index: int = 0
    root: bytes = b""  # of its prefix keys: tells a later scheduler whose KV this is


class SlotKv(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has computed for one slot, for a scheduler that finds the rank alive: whole blocks from the start."""

    root: bytes
    token_ids: bytes  # int32; as many as fill the blocks
    blocks: bytes  # int32


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens [start, start + num_tokens) of a slot's known ids; sample after the last one if `samples`."""

    slot: int
    start: int
    num_tokens: int
    samples: bool


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One model step of one group. Workers carry out the fields in this order; plans run in the order of step_id.

    A plan may be sent before the result of the one before it is known: a decode slot goes on from the token that it
    sampled last, wherever that is by then.
    """

    step_id: int
    freed_slots: list[int]  # forget these rows
    new_slots: list[NewSlot]  # fill these rows (their block tables start empty)
    table_slots: bytes  # int32; append block table_blocks[i] to the block table of slot table_slots[i], in order
    table_blocks: bytes  # int32
    block_copies: list[tuple[int, int]]  # copy KV block (source, destination), before the forward pass
    chunks: list[Chunk]  # prefill pieces
    decode_slots: bytes  # int32; slots that compute the one token they sampled last, and sample the next
    num_draft_tokens: int = 0  # that a worker may propose and verify for each decode slot, within the slot's blocks
    block_imports: list[tuple[int, int, int]] = []  # copy KV block (lost group, its block, destination) into this pool,
    # before all else


class PoolFile(msgspec.Struct, frozen=True, array_like=True):
    """One rank's KV pool in memory that its neighbours on the host can map, and keep when the rank dies."""

    path: str  # /proc/<pid>/fd/<n> of its owner
    name: str  # of the memory itself; a reader verifies it, since the path means something else once the owner is gone
    num_blocks: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, natural log, of the distribution before temperature and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: list[tuple[int, float]]  # best first


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Tokens sampled by a step: rows are the plan's chunks with `samples`, in order, then its decode slots in order."""

    step_id: int
    token_ids: bytes  # int32; all rows' ids one after the other
    num_tokens: bytes = b""  # int32 per row; empty: one each. More than one is accepted speculation; a chunk's row has
    # none when its grammar is not compiled yet: its last token is to be computed again
    logprobs: dict[int, list[TokenLogprobs]] = {}  # slot -> one per sampled id, where asked
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}  # slot -> one per prompt token of this step's chunk
    failed: dict[int, str] = {}  # slot -> why this request alone cannot go on (its row's ids are void)
    num_drafted: int = 0
    num_accepted: int = 0
    forward_s: float = 0.0  # wall time of the step on rank 0, and of its sampling
    sample_s: float = 0.0


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one choice of one request. The last one carries the finish reason; nothing follows it."""

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first delta
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; with the first delta
    stop_token_id: int | None = None  # the token that ended it (it is in token_ids too)
    queue_s: float = 0.0  # time from arrival to first being scheduled; with the first delta
    error: str = ""


class StepDeltas(msgspec.Struct, frozen=True, array_like=True, tag="deltas"):
    """All that one step has for one router replica."""

    deltas: list[TokenDelta]
