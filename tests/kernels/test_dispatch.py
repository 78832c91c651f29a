"""Which version of an operation runs, and that what cannot run says so."""

from __future__ import annotations

import logging

import pytest

from orcaserve.kernels import block_copy, kv_write, paged_attention, rms_norm, rope, silu_mul
from orcaserve.kernels.cpu import available
from orcaserve.kernels.dispatch import BackendUnavailable, CannotRun, Implementation, Operation

OPERATIONS = [
    rms_norm.operation,
    rope.operation,
    kv_write.operation,
    block_copy.operation,
    silu_mul.silu_operation,
    silu_mul.gelu_operation,
    paged_attention.operation,
]


def reference() -> str:
    return "reference"


def loader(name: str) -> Implementation:
    return lambda: lambda: name


def broken() -> Implementation:
    raise CannotRun("its library is missing")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_runs_on_the_cpu(operation: Operation) -> None:
    assert operation.backend_name("cpu") == ("cpu" if available() else "reference")
    assert operation.implementation("cpu", "reference") is operation.reference


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_triton_is_not_for_cpu_tensors(operation: Operation) -> None:
    with pytest.raises(BackendUnavailable, match=r"triton.*'cpu'.*'cuda'"):
        operation.implementation("cpu", "triton")


@pytest.mark.parametrize(("device", "name"), [("cuda", "triton"), ("cpu", "cpu"), ("mps", "reference")])
def test_the_device_picks(device: str, name: str) -> None:
    operation = Operation("op", reference, {"triton": loader("triton"), "cpu": loader("cpu")})
    assert operation.backend_name(device) == name
    assert operation.implementation(device)() == name


def test_a_backend_asked_for_by_name_never_becomes_another() -> None:
    operation = Operation("op", reference, {"triton": broken, "cpu": broken, "xformers": loader("xformers")})
    for backend, device in (("triton", "cuda"), ("cpu", "cpu"), ("xformers", "cpu"), ("flashinfer", "cuda")):
        with pytest.raises(BackendUnavailable) as raised:
            operation.implementation(device, backend)
        assert (raised.value.operation, raised.value.backend, raised.value.device) == ("op", backend, device)
    assert operation.implementation("cuda", "xformers")() == "xformers"


def test_without_a_compiler_the_cpu_has_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    operation = Operation("op", reference, {"cpu": broken})
    with caplog.at_level(logging.WARNING):
        assert operation.backend_name("cpu") == "reference"
    assert "its library is missing" in caplog.text


def test_a_gpu_without_its_kernels_is_an_error() -> None:
    """The reference would answer correctly and a thousand times too slowly: nobody would look for the cause."""
    with pytest.raises(BackendUnavailable, match="its library is missing"):
        Operation("op", reference, {"triton": broken}).implementation("cuda")


def test_a_version_is_loaded_once_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loads: list[int] = []

    def counting() -> Implementation:
        loads.append(1)
        return reference

    operation = Operation("op", reference, {"cpu": counting})
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            operation.implementation("cpu")
    assert len(loads) == 1
    assert caplog.text.count("op on cpu (asked for: auto): cpu") == 1
