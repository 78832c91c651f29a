"""KV pools that neighbours read: what they find there, when they are refused, and that nothing is left behind."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pool_process
import pytest
import torch
from pool_process import fill, known_values, pool_shape

from orcaserve.engine.messages import PoolFile
from orcaserve.workers.errors import PoolUnreadable
from orcaserve.workers.kv_pool import SharedKvPool

DTYPES = [torch.float32, torch.bfloat16]
LOST, OTHER = 7, 3  # ids of groups

MakePool = Callable[..., SharedKvPool]


@pytest.fixture
def make_pool(tiny) -> Iterator[MakePool]:
    """make_pool(blocks, dtype): closed at the end."""
    made: list[SharedKvPool] = []

    def make(num_blocks: int = 20, dtype: torch.dtype = torch.float32) -> SharedKvPool:
        made.append(SharedKvPool(pool_shape(tiny("llama")[0], dtype), num_blocks))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def references(name: str) -> tuple[int, int]:
    """(bytes mapped, descriptors) of the memory of that name in this process.

    Not the lines of a map: the kernel splits one where huge pages are asked for, by how its address is aligned.
    """
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    mapped = sum(int(end, 16) - int(start, 16) for start, end in ranges)
    links = [descriptor for descriptor in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{descriptor}")]
    return mapped, sum(name in os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in links)


def assert_imported(pool: SharedKvPool, imports: list[tuple[int, int, int]], values: list[torch.Tensor]) -> None:
    """These blocks are what they were in `values`, all others are as new."""
    _, sources, destinations = np.array(imports).T
    untouched = np.setdiff1d(np.arange(pool.file.num_blocks), destinations)
    for layer, expected in zip(pool.layers, values, strict=True):
        assert torch.equal(layer[:, destinations], expected[:, sources])
        assert not layer[:, untouched].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_are_those_of_a_private_pool(make_pool, dtype):
    pool = make_pool(9, dtype)
    private = pool.shape.allocate(9, torch.device("cpu"))
    assert len(pool.layers) == len(private)
    for layer, other in zip(pool.layers, private, strict=True):
        assert (layer.shape, layer.dtype, layer.stride()) == (other.shape, other.dtype, other.stride())
        assert layer.data_ptr() % mmap.PAGESIZE == 0
        assert not layer.any()
    fill(pool)  # no layer reaches into another
    assert all(map(torch.equal, pool.layers, known_values(pool)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_come_over_bit_by_bit_from_pools_of_several_groups(make_pool, dtype):
    lost, other, pool = make_pool(20, dtype), make_pool(5, dtype), make_pool(12, dtype)
    fill(lost)
    for layer in other.layers:
        layer.fill_(2)
    pool.hold(LOST, lost.file)
    pool.hold(OTHER, other.file)
    imports = [(LOST, 19, 0), (LOST, 2, 11), (LOST, 2, 4)]
    pool.import_blocks(imports)
    assert_imported(pool, imports, lost.layers)
    pool.import_blocks([(LOST, 0, 1), (OTHER, 4, 2), (LOST, 7, 3)])
    for layer, theirs in zip(pool.layers, lost.layers, strict=True):
        assert torch.equal(layer[:, [1, 3]], theirs[:, [0, 7]])
        assert (layer[:, 2] == 2).all()


def test_what_the_owner_writes_later_is_seen_and_it_alone_writes(make_pool):
    lost, pool = make_pool(), make_pool()
    pool.hold(LOST, lost.file)
    fill(lost)
    pool.import_blocks([(LOST, 1, 2)])
    assert_imported(pool, [(LOST, 1, 2)], known_values(lost))
    fill(pool)
    assert all(map(torch.equal, lost.layers, known_values(lost)))
    mapped = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if lost.file.name in line]
    assert mapped.count("r--s") == 1, "the neighbour's mapping is read only"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_blocks_of_a_killed_process_are_still_there(make_pool, tiny, dtype):
    pool = make_pool(12, dtype)
    command = [sys.executable, pool_process.__file__, str(tiny("llama")[0]), str(dtype).removeprefix("torch."), "20"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        file = msgspec.json.decode(process.stdout.readline(), type=PoolFile)
        pool.hold(LOST, file)
        process.kill()
    imports = [(LOST, 0, 11), (LOST, 19, 3), (LOST, 5, 5)]
    pool.import_blocks(imports)
    assert_imported(pool, imports, known_values(make_pool(20, dtype)))
    with pytest.raises(PoolUnreadable, match="No such file"):
        make_pool().hold(LOST, file)  # it comes too late


def test_a_path_that_leads_elsewhere_is_unreadable(make_pool, tmp_path):
    lost, pool = make_pool(), make_pool()
    file = msgspec.structs.replace(lost.file, name="orcaserve-kv-1-0")
    with pytest.raises(PoolUnreadable, match=f"{lost.file.name}.*, not the KV pool {file.name}$"):
        pool.hold(LOST, file)
    # Of a process in another container, the path would mean whatever this one has there: a pipe, say, without a writer.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(PoolUnreadable, match=f"{fifo} is {fifo}, not"):
        pool.hold(LOST, msgspec.structs.replace(lost.file, path=str(fifo)))


def test_a_pool_of_another_size_is_unreadable(make_pool):
    lost, pool = make_pool(20), make_pool(20)
    with pytest.raises(PoolUnreadable, match=r"has \d+ bytes, not \d+"):
        pool.hold(LOST, msgspec.structs.replace(lost.file, num_blocks=2000))


def test_a_pool_that_is_gone_is_unreadable(make_pool, tiny):
    lost = SharedKvPool(pool_shape(tiny("llama")[0], torch.float32), 20)
    pool = make_pool()
    lost.close()
    with pytest.raises(PoolUnreadable, match="No such file"):
        pool.hold(LOST, lost.file)


def test_nothing_is_left_of_a_pool_that_is_dropped(make_pool):
    lost, pool = make_pool(), make_pool()
    alone = references(lost.file.name)
    pool.drop(LOST)  # which is not held
    pool.hold(LOST, lost.file)
    assert references(lost.file.name) > alone
    pool.import_blocks([(LOST, 1, 2)])
    pool.drop(LOST)
    assert references(lost.file.name) == alone
    pool.hold(LOST, lost.file)
    pool.hold(OTHER, lost.file)
    pool.drop_all()
    assert references(lost.file.name) == alone
    with pytest.raises(AssertionError, match=f"group {LOST} is not held"):
        pool.import_blocks([(LOST, 1, 2)])


def test_memory_lives_as_long_as_its_last_holder(make_pool, tiny):
    lost, pool = SharedKvPool(pool_shape(tiny("llama")[0], torch.float32), 20), make_pool()
    fill(lost)
    name, values = lost.file.name, known_values(lost)
    pool.hold(LOST, lost.file)
    lost.close()
    del lost
    pool.import_blocks([(LOST, 4, 1)])
    assert_imported(pool, [(LOST, 4, 1)], values)
    pool.drop_all()
    assert references(name) == (0, 0)


def test_a_pool_takes_the_place_of_the_former_one_of_its_group(make_pool):
    former, later, pool = make_pool(20), make_pool(8), make_pool()
    former_alone, later_alone = references(former.file.name), references(later.file.name)
    fill(later)
    pool.hold(LOST, former.file)
    pool.hold(LOST, later.file)
    assert references(former.file.name) == former_alone
    assert references(later.file.name) > later_alone
    pool.import_blocks([(LOST, 7, 0)])
    assert_imported(pool, [(LOST, 7, 0)], later.layers)
    with pytest.raises(PoolUnreadable):
        pool.hold(LOST, msgspec.structs.replace(former.file, num_blocks=2000))
    assert references(later.file.name) == later_alone, "it was the pool of a group that has another one now"
