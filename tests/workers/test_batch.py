"""The flat batch against a plain loop over tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from orcaserve.engine.messages import Chunk, NewSlot, StepPlan
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers.batch import build_batch
from orcaserve.workers.slots import SlotTable

BLOCK = 4
SAMPLING = SamplingParams(max_tokens=8, seed=0)
EMPTY = np.empty(0, np.int32)


@st.composite
def steps(draw):
    """Slots with some tokens each; some of them prefill a chunk, some decode, with drafts or without."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    kinds = draw(st.lists(st.sampled_from(["prefill", "decode", "idle"]), min_size=len(lengths), max_size=len(lengths)))
    chunks = []
    for slot, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
        if kind == "prefill":
            start = draw(st.integers(0, length - 1))
            chunks.append(Chunk(slot, start, draw(st.integers(1, length - start)), draw(st.booleans())))
    decodes = draw(st.permutations([slot for slot, kind in enumerate(kinds) if kind == "decode"]))
    drafts = [draw(st.lists(st.integers(500, 900), max_size=3)) for _ in decodes] if draw(st.booleans()) else None
    return lengths, chunks, decodes, drafts


def apply(lengths, chunks, decodes) -> tuple[SlotTable, StepPlan]:
    table = SlotTable(8, 40, BLOCK)
    rng = np.random.default_rng(0)
    blocks = rng.permutation(200).astype(np.int32)
    new, owners = [], []
    for slot, length in enumerate(lengths):
        new.append(NewSlot(slot, rng.integers(0, 99, length).astype(np.int32).tobytes(), length, SAMPLING))
        owners += [slot] * -(-(length + 3) // BLOCK)
    ids = blocks[: len(owners)].tobytes()
    decode_slots = np.array(decodes, np.int32).tobytes()
    plan = StepPlan(1, [], new, np.array(owners, np.int32).tobytes(), ids, [], chunks, decode_slots)
    table.apply_plan(plan)
    return table, plan


@given(steps())
def test_the_flat_batch_is_what_the_plan_says(step):
    lengths, chunks, decodes, drafts = step
    table, plan = apply(lengths, chunks, decodes)
    arrays = None if drafts is None else [np.array(draft, np.int32) for draft in drafts]
    batch = build_batch(plan, table, arrays)
    if not chunks and not decodes:
        assert batch is None
        return
    assert batch is not None

    # (slot, first position, tokens, samples)
    wanted = [(c.slot, c.start, table.token_ids[c.slot, c.start : c.start + c.num_tokens], c.samples) for c in chunks]
    for place, slot in enumerate(decodes):
        last = lengths[slot] - 1
        draft = [] if drafts is None else drafts[place]
        wanted.append((slot, last, np.array([table.token_ids[slot, last], *draft]), True))

    assert batch.slots.tolist() == [slot for slot, *_ in wanted]
    assert np.diff(batch.query_start).tolist() == [len(ids) for _, _, ids, _ in wanted]
    assert batch.sampled.tolist() == [place for place, (*_, samples) in enumerate(wanted) if samples]
    assert batch.context_lens.tolist() == [start + len(ids) for _, start, ids, _ in wanted]
    for place, (slot, start, ids, _) in enumerate(wanted):
        own = slice(batch.query_start[place], batch.query_start[place + 1])
        positions = np.arange(start, start + len(ids))
        assert batch.positions[own].tolist() == positions.tolist()
        assert batch.input_ids[own].tolist() == ids.tolist()
        blocks = table.block_tables[slot]
        assert batch.slot_mapping[own].tolist() == [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions.tolist()]
        used = -(-(start + len(ids)) // BLOCK)
        assert batch.block_tables[place, :used].tolist() == blocks[:used].tolist()
    assert table.num_tokens[: len(lengths)].tolist() == lengths, "drafts are not known tokens"
