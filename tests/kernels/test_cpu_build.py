"""Compiling the native library: once, whole, again when anything changes, and what happens without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from orcaserve.kernels import cpu
from orcaserve.kernels.cpu import build, library
from orcaserve.kernels.dispatch import BackendUnavailable
from orcaserve.kernels.linear import linear, pack
from orcaserve.kernels.rms_norm import operation, rms_norm, rms_norm_reference

needs_compiler = pytest.mark.skipif(not cpu.available(), reason="no C compiler")


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile at once, in a folder of their own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.c").write_text("int one(void) { return 1; }")
    (folder / "two.c").write_text('#include "two.h"\nint two(void) { return TWO; }')
    (folder / "two.h").write_text("#define TWO 2")
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    return folder


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process as it is before the first operation."""
    monkeypatch.setattr(library._Holder, "library", None)
    monkeypatch.setattr(library._Holder, "failure", None)
    monkeypatch.setattr(operation, "_picked", {})


@needs_compiler
def test_compiles_once_and_again_when_a_header_changes(small_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert build.load(cache).two() == 2
    (first,) = cache.glob("*.so")
    written = first.stat().st_mtime_ns
    assert build.load(cache).one() == 1
    assert first.stat().st_mtime_ns == written
    (small_sources / "two.h").write_text("#define TWO 22")
    assert build.load(cache).two() == 22
    assert len(list(cache.iterdir())) == 2  # and nothing half-made is left behind


@needs_compiler
def test_the_cache_keeps_what_was_used_last(small_sources: Path, tmp_path: Path) -> None:
    """A new library takes the place of the one that was loaded longest ago, and leftovers go too."""
    cache = tmp_path / "cache"
    build.load(cache)
    (first,) = cache.glob("*.so")
    for age in range(1, build.MAX_LIBRARIES + 3):
        old = cache / f"cpu-{age}.so"
        old.touch()
        os.utime(old, (1000.0 - age, 5000.0))
    (cache / "building-abc").mkdir()
    os.utime(cache / "building-abc", (0.0, 0.0))
    (cache / "building-now").mkdir()
    os.utime(first, (10.0, 10.0))
    build.load(cache)  # used: the youngest but for the one to come
    (small_sources / "two.h").write_text("#define TWO 22")
    build.load(cache)
    libraries = {path.name for path in cache.glob("*.so")}
    assert first.name in libraries
    assert {f"cpu-{age}.so" for age in range(1, build.MAX_LIBRARIES - 1)} < libraries
    assert len(libraries) == build.MAX_LIBRARIES
    assert [path.name for path in cache.glob("building-*")] == ["building-now"]


@needs_compiler
def test_processes_that_compile_at_once_all_get_a_whole_library(small_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        assert [loaded.two() for loaded in pool.map(lambda _: build.load(cache), range(8))] == [2] * 8
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_a_compiler_that_refuses_says_why(small_sources: Path, tmp_path: Path) -> None:
    (small_sources / "two.h").write_text("#error nothing fits")
    with pytest.raises(build.BuildError, match="nothing fits"):
        build.load(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_the_reference_runs(unloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not cpu.available()
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    assert operation.backend_name("cpu") == "reference"
    packed = pack(weight.view(1, 8))
    assert packed.backend == "torch"
    torch.testing.assert_close(linear(x, packed), x @ weight.view(8, 1))
    with pytest.raises(BackendUnavailable, match="rms_norm: backend 'cpu' cannot run"):
        operation.implementation("cpu", "cpu")
    with pytest.raises(build.BuildError, match="no C compiler found"):
        cpu.set_num_threads(1)


@needs_compiler
@pytest.mark.parametrize("target", ["-march=haswell", pytest.param("-march=x86-64", marks=pytest.mark.nightly)])
def test_machines_without_avx512_compute_the_same(target: str) -> None:
    """The other widths run on this machine too: their tests, in a process that loads such a library."""
    if "x86_64" not in build.cpu_identity():
        pytest.skip("needs an x86-64 machine")
    code = (
        "import sys, pytest\n"
        "from orcaserve.kernels.cpu import build, library\n"
        "loaded = library._declared(build.load(build.default_cache_dir(), sys.argv[1]))\n"
        "loaded.orca_set_num_threads(1)\n"
        "library._Holder.library = loaded\n"
        "files = [f'tests/kernels/test_{name}.py' for name in ('cpu_attention', 'cpu_rows', 'linear')]\n"
        "some = '9-3-64-16 or team or rms_norm or rope or gates or any_shape'\n"
        "sys.exit(pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '-k', some, *files]))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, target]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@needs_compiler
def test_the_number_of_threads_is_checked() -> None:
    before = cpu.num_threads()
    with pytest.raises(ValueError, match="between 1 and 128, not 0"):
        cpu.set_num_threads(0)
    assert cpu.num_threads() == before
