"""Which version of an operation runs: by the tensor's device, or by name; a name that cannot run is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "xformers", "flashinfer", "cpu", "reference")


class BackendUnavailable(RuntimeError):
    """The backend that was asked for by name cannot run this operation here."""

    def __init__(self, operation: str, backend: str, device: str, reason: str) -> None:
        super().__init__(f"{operation}: backend {backend!r} cannot run on device {device!r}: {reason}")
        self.operation = operation
        self.backend = backend
        self.device = device
        self.reason = reason


class CannotRun(Exception):
    """Raised by a backend's loader, with the reason why it does not run here."""


Implementation = Callable[..., Any]
Loader = Callable[[], Implementation]


class Pick(NamedTuple):
    """A backend's name and what it runs."""

    name: str
    run: Implementation


class Operation:
    """One operation: its reference, its fast versions and the rule that picks among them.

    A loader imports a fast version at its first use: a CPU server never imports triton, a machine without triton
    still has the reference. Picks are remembered, so a call pays one dictionary look-up (about 0.3 us).
    """

    def __init__(self, name: str, reference: Implementation, loaders: Mapping[str, Loader]) -> None:
        self.name = name
        self.reference = reference
        self.loaders = dict(loaders)
        self._picked: dict[tuple[str, str], Pick] = {}

    def implementation(self, device: str, backend: str = "auto") -> Implementation:
        """What runs for tensors on `device`. Raises BackendUnavailable when the named backend cannot."""
        picked = self._picked.get((device, backend))
        return picked.run if picked is not None else self._pick(device, backend).run

    def backend_name(self, device: str, backend: str = "auto") -> str:
        """Says which backend `implementation` picks."""
        self.implementation(device, backend)
        return self._picked[device, backend].name

    def _pick(self, device: str, backend: str) -> Pick:
        name = self._automatic(device) if backend == "auto" else backend
        try:
            picked = Pick(name, self._load(name, device))
        except CannotRun as error:
            if backend != "auto" or device == "cuda":
                raise BackendUnavailable(self.name, name, device, str(error)) from error
            picked = Pick("reference", self.reference)
            logger.warning("%s on %s: %s; the torch reference runs instead", self.name, device, error)
        self._picked[device, backend] = picked
        logger.info("%s on %s (asked for: %s): %s", self.name, device, backend, picked.name)
        return picked

    def _automatic(self, device: str) -> str:
        wanted = {"cuda": "triton", "cpu": "cpu"}.get(device, "reference")
        return wanted if wanted in self.loaders else "reference"

    def _load(self, name: str, device: str) -> Implementation:
        if name == "reference":
            return self.reference
        if name not in BACKENDS:
            raise CannotRun(f"no such backend; there are {', '.join(BACKENDS)}")
        if name not in self.loaders:
            raise CannotRun(f"{self.name} has none; it has {', '.join(['reference', *self.loaders])}")
        device_of_backend = "cpu" if name == "cpu" else "cuda"
        if device != device_of_backend:
            raise CannotRun(f"it needs tensors on {device_of_backend!r}")
        return self.loaders[name]()


def native_cpu(function: str) -> Loader:
    """A loader of one function of kernels.cpu, which needs a C compiler."""

    def load() -> Implementation:
        from orcaserve.kernels import cpu

        if not cpu.available():
            raise CannotRun("the native CPU kernels could not be compiled")
        return getattr(cpu, function)

    return load
