"""Every way in which a worker refuses to start or cannot go on, on one page."""

from __future__ import annotations


class WorkerError(Exception):
    """Base."""


class ModelLoadError(WorkerError):
    """A checkpoint is damaged, incomplete or of a kind that is not supported."""

    def __init__(self, file: str, tensor: str, reason: str) -> None:
        where = f"{file}: {tensor}" if tensor else file
        super().__init__(f"{where}: {reason}")
        self.file = file
        self.tensor = tensor
        self.reason = reason

    def __reduce__(self) -> tuple[type[ModelLoadError], tuple[str, str, str]]:
        return ModelLoadError, (self.file, self.tensor, self.reason)


class ModelFetchError(WorkerError):
    """A model that was asked for by name could not be fetched."""


class ShardingError(WorkerError):
    """The model cannot be cut into this many ranks."""

    def __init__(self, num_heads: int, num_kv_heads: int, tensor_parallel_size: int, reason: str) -> None:
        super().__init__(
            f"tensor_parallel_size={tensor_parallel_size} does not work for a model with {num_heads} attention heads "
            f"and {num_kv_heads} KV heads: {reason}"
        )
        self.arguments = (num_heads, num_kv_heads, tensor_parallel_size, reason)

    def __reduce__(self) -> tuple[type[ShardingError], tuple[int, int, int, str]]:
        return ShardingError, self.arguments


class BackendUnusable(WorkerError):
    """The attention backend that was asked for does not run here."""


class CannotCompile(WorkerError):
    """torch.compile was asked for where it cannot be had."""


class NotEnoughMemory(WorkerError):
    """Weights fit, but too little is left for a useful KV pool."""


class PoolUnreadable(WorkerError):
    """The KV pool of a neighbour is not there any more, not on this host, or of another shape."""


class RendezvousTimeout(WorkerError):
    """The ranks of the group did not all meet in time."""


class PeerLost(WorkerError):
    """Another rank of the group did not take part in a collective in time."""
