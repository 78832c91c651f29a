"""The Triton kernels compile for the GPUs that this machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def compile_kernels(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the interpreter of the other tests must not be near."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "orcaserve.kernels.aot", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def default_kernels() -> list[str]:
    done = compile_kernels("--default-only")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_default_configurations_compile_and_do_not_spill(default_kernels: list[str]) -> None:
    summary = json.loads(default_kernels[-1])
    assert summary["faults"] == []
    figures = [line.split(" attention_kernel ")[1].split() for line in default_kernels if " attention_kernel " in line]
    assert len(figures) >= 8  # two head sizes, decode and mixed, two targets
    for registers, shared_bytes, spilled_bytes, _ in figures:
        assert 32 < int(registers) <= 255
        assert int(shared_bytes) > 16 * 1024  # tiles of keys and values on their way
        assert spilled_bytes == "0"


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize(
    "kernel",
    ["attention_kernel", "merge_kernel", "rms_norm_kernel", "gate_kernel", "rope_kv_kernel", "kv_write_kernel",
     "copy_blocks_kernel"],
)  # fmt: skip
def test_every_kernel_is_built_for_every_target(default_kernels: list[str], target: str, kernel: str) -> None:
    assert any(line.startswith(target) and f" {kernel} " in line for line in default_kernels)


def test_an_interpreter_is_not_a_compiler() -> None:
    done = compile_kernels("--default-only", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr
