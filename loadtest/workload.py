"""What is sent: lengths, shared prefixes, conversations, tenants and cancellations, all drawn from one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orcaserve.loadtest.trace import TraceRow

Lengths = NDArray[np.int64]
LengthSampler = Callable[[int, np.random.Generator], tuple[Lengths, Lengths]]  # n, rng -> prompt, output tokens


class BadWorkload(ValueError):
    """A workload that cannot be built: the message names the field and the number."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send. The first `prefix_tokens` of its prompt are those of shared prefix number `prefix`.

    Turns of one `session` follow each other: turn k is sent once turn k - 1 is answered, with all before it as context.
    """

    index: int
    prompt_tokens: int  # of this turn alone, the shared prefix included
    output_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0
    session: int = -1
    turn: int = 0
    tenant: str = ""
    cancel_after_tokens: int | None = None  # the client hangs up after this many chunks
    text: str = ""  # the prompt, where a data set gave one; otherwise made up from the seed


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What `build` is asked for."""

    num_requests: int
    lengths: LengthSampler
    seed: int = 0
    num_prefixes: int = 0  # 0: no shared prefixes
    prefix_tokens: int = 0
    turns: int = 1  # requests of one conversation
    tenants: tuple[str, ...] = ()  # drawn evenly
    cancel_share: float = 0.0  # of all requests


def fixed(prompt_tokens: int, output_tokens: int) -> LengthSampler:
    """The same lengths for all."""
    return uniform((prompt_tokens, prompt_tokens), (output_tokens, output_tokens))


def uniform(prompt: tuple[int, int], output: tuple[int, int]) -> LengthSampler:
    """Each length evenly between its bounds, both included."""
    for name, (low, high) in (("prompt", prompt), ("output", output)):
        if not 1 <= low <= high:
            raise BadWorkload(f"{name} lengths must satisfy 1 <= low <= high, got {low}-{high}")

    def draw(n: int, rng: np.random.Generator) -> tuple[Lengths, Lengths]:
        return rng.integers(*prompt, size=n, endpoint=True), rng.integers(*output, size=n, endpoint=True)

    return draw


def lognormal(
    prompt: tuple[float, float, int, int],
    output: tuple[float, float, int, int],
) -> LengthSampler:
    """Truncated log-normal lengths; each side is (median, sigma, low, high). Draws outside the bounds are redrawn."""

    def side(n: int, rng: np.random.Generator, shape: tuple[float, float, int, int]) -> Lengths:
        median, sigma, low, high = shape
        lengths = np.zeros(n, np.int64)
        todo = np.arange(n)
        while len(todo):
            lengths[todo] = np.rint(median * np.exp(sigma * rng.standard_normal(len(todo))))
            todo = todo[(lengths[todo] < low) | (lengths[todo] > high)]
        return lengths

    def draw(n: int, rng: np.random.Generator) -> tuple[Lengths, Lengths]:
        return side(n, rng, prompt), side(n, rng, output)

    return draw


# Shaped like ShareGPT as serving papers use it (long right tails on both sides), within 100..1,500 and 50..800 tokens.
SHAREGPT = lognormal((250.0, 0.9, 100, 1500), (200.0, 0.8, 50, 800))
# The same shape in a tenth of the size, for models and machines where the full one takes too long.
SHAREGPT_SMALL = lognormal((25.0, 0.9, 10, 150), (20.0, 0.8, 5, 80))


def parse_lengths(spec: str) -> LengthSampler:
    """`sharegpt`, `sharegpt-small`, `fixed:IN,OUT` or `uniform:LOW-HIGH,LOW-HIGH`."""
    kind, _, rest = spec.partition(":")
    try:
        if kind == "sharegpt" and not rest:
            return SHAREGPT
        if kind == "sharegpt-small" and not rest:
            return SHAREGPT_SMALL
        if kind == "fixed":
            prompt, output = (int(part) for part in rest.split(","))
            return fixed(prompt, output)
        if kind == "uniform":
            (a, b), (c, d) = ((int(end) for end in part.split("-")) for part in rest.split(","))
            return uniform((a, b), (c, d))
    except BadWorkload:
        raise
    except ValueError as error:
        raise BadWorkload(f"lengths {spec!r}: {error}") from error
    raise BadWorkload(f"lengths {spec!r}: want sharegpt, sharegpt-small, fixed:IN,OUT or uniform:LOW-HIGH,LOW-HIGH")


def build(spec: WorkloadSpec) -> list[LoadRequest]:
    """The requests in sending order; the same spec gives the same list."""
    _check(spec)
    rng = np.random.default_rng(spec.seed)
    n = spec.num_requests
    prompt, output = spec.lengths(n, rng)
    prefix = rng.integers(0, max(1, spec.num_prefixes), size=n)
    tenant = rng.integers(0, max(1, len(spec.tenants)), size=n)
    cancelled = rng.random(n) < spec.cancel_share
    cancel_after = rng.integers(1, np.maximum(2, output))
    shared = spec.prefix_tokens if spec.num_prefixes else 0
    requests = []
    for i in range(n):
        session, turn = divmod(i, spec.turns)
        first = session * spec.turns  # a conversation keeps the tenant and the prefix of its first turn
        own_prefix = shared if turn == 0 else 0
        requests.append(
            LoadRequest(
                index=i,
                prompt_tokens=int(prompt[i]) + own_prefix,
                output_tokens=int(output[i]),
                prefix=int(prefix[first]),
                prefix_tokens=own_prefix,
                session=session if spec.turns > 1 else -1,
                turn=turn,
                tenant=spec.tenants[tenant[first]] if spec.tenants else "",
                cancel_after_tokens=int(cancel_after[i]) if cancelled[i] else None,
            )
        )
    return requests


def from_trace(rows: Sequence[TraceRow], num_requests: int | None = None, max_tokens: int = 0) -> list[LoadRequest]:
    """A trace's rows as requests; `max_tokens` above 0 cuts prompt + output to that (the model's context)."""
    requests: list[LoadRequest] = []
    turns: dict[int, int] = {}
    for row in rows[:num_requests]:
        turn = turns.get(row.session, 0) if row.session >= 0 else 0
        turns[row.session] = turn + 1
        request = LoadRequest(
            len(requests), row.prompt_tokens, row.output_tokens, session=row.session, turn=turn, text=row.prompt
        )
        requests.append(_cut(request, max_tokens) if max_tokens else request)
    return requests


def _cut(request: LoadRequest, max_tokens: int) -> LoadRequest:
    """The answer gets at most half of the context, the prompt what is left."""
    output = min(request.output_tokens, max_tokens // 2)
    return replace(request, prompt_tokens=min(request.prompt_tokens, max_tokens - output), output_tokens=output)


def _check(spec: WorkloadSpec) -> None:
    if spec.num_requests < 1:
        raise BadWorkload(f"num_requests must be at least 1, got {spec.num_requests}")
    if spec.turns < 1:
        raise BadWorkload(f"turns must be at least 1, got {spec.turns}")
    if not 0 <= spec.cancel_share <= 1:
        raise BadWorkload(f"cancel_share must lie in 0..1, got {spec.cancel_share}")
    if spec.num_prefixes < 0 or spec.prefix_tokens < 0 or bool(spec.num_prefixes) != bool(spec.prefix_tokens):
        raise BadWorkload(
            f"shared prefixes need num_prefixes and prefix_tokens, got {spec.num_prefixes} and {spec.prefix_tokens}"
        )
