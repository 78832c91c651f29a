"""What the operator allows: limits that are checked before any work is done, and each tenant's share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orcaserve.cluster.app_config import ApiLimits
from orcaserve.cluster.auth import Tenant
from orcaserve.cluster.errors import RateLimited
from orcaserve.cluster.protocol import GenerationRequest
from orcaserve.cluster.protocol_chat import ChatCompletionRequest
from orcaserve.cluster.protocol_completions import CompletionRequest
from orcaserve.engine.errors import InvalidParameter


def check_fields(request: GenerationRequest, limits: ApiLimits, vocab_size: int) -> None:
    """Everything about a request's fields that needs no tokenizer. Raises InvalidParameter."""
    _check_unsupported(request)
    _check_sizes(request, limits)
    _check_token_ids(request, vocab_size)
    _check_combinations(request)


def _check_unsupported(request: GenerationRequest) -> None:
    extra = request.model_extra or {}
    for field, harmless in request.unsupported.items():
        value = extra.get(field)
        if value is not None and value not in harmless:
            hint = " (use structured_outputs)" if field.startswith("guided_") else ""
            raise InvalidParameter(f"'{field}' is not supported by this server{hint}.", field)


def _check_sizes(request: GenerationRequest, limits: ApiLimits) -> None:
    stops, bad_words = stop_strings(request), request.bad_words or []
    sizes: list[tuple[str, str, int | None, int]] = [
        ("stop", "stop strings", len(stops), limits.max_stop_strings),
        ("stop", "characters in a stop string", max(map(len, stops), default=0), limits.max_stop_chars),
        ("stop_token_ids", "ids", len(request.stop_token_ids or ()), limits.max_stop_token_ids),
        ("logit_bias", "entries", len(request.logit_bias or ()), limits.max_logit_bias),
        ("bad_words", "words", len(bad_words), limits.max_bad_words),
        ("bad_words", "characters in a word", max(map(len, bad_words), default=0), limits.max_bad_word_chars),
        ("prompt_logprobs", "logprobs a token", request.prompt_logprobs, limits.max_logprobs),
        ("n", "choices", request.n, limits.max_choices),
    ]
    if isinstance(request, ChatCompletionRequest):
        sizes.append(("top_logprobs", "logprobs a token", request.top_logprobs, limits.max_logprobs))
        sizes.append(("messages", "messages", len(request.messages), limits.max_messages))
    if isinstance(request, CompletionRequest):
        prompts = len(request.prompts)
        sizes.append(("logprobs", "logprobs a token", request.logprobs, limits.max_logprobs))
        sizes.append(("best_of", "choices", request.best_of, limits.max_choices))
        sizes.append(("prompt", "prompts", prompts, limits.max_choices))
        sizes.append(("n", "choices (n times prompts)", (request.n or 1) * prompts, limits.max_choices))
        sizes.append(
            ("best_of", "choices (best_of times prompts)", (request.best_of or 1) * prompts, limits.max_choices)
        )
    for field, what, value, limit in sizes:
        if value is not None and value > limit:
            raise InvalidParameter(f"{field}: {value} {what}, but this server allows {limit}.", field)


def _check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    for field in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(request, field)
        if ids and max(ids) >= vocab_size:
            raise InvalidParameter(f"{field}: the vocabulary has {vocab_size} tokens, ids from 0.", field)
    if request.allowed_token_ids == []:
        raise InvalidParameter("allowed_token_ids: an empty list allows nothing.", "allowed_token_ids")
    for key in request.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise InvalidParameter(
                f"logit_bias: keys are token ids from 0 to {vocab_size - 1}, written as integers.", "logit_bias"
            )
    for ids in (request.resume_token_ids or {}).values():
        if ids and max(ids) >= vocab_size:
            raise InvalidParameter(f"resume_token_ids: the vocabulary has {vocab_size} tokens.", "resume_token_ids")


def _check_combinations(request: GenerationRequest) -> None:
    def wrong(field: str, message: str) -> InvalidParameter:
        return InvalidParameter(f"{field}: {message}.", field)

    chat = isinstance(request, ChatCompletionRequest)
    least = 1 if chat or not getattr(request, "echo", None) else 0
    for field in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, field, None)
        if value is not None and value < least:
            raise wrong(field, f"{value} is below the minimum of {least} (0 asks for an echo only, with echo)")
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "only allowed with stream: true")
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        if request.continue_final_message and request.add_generation_prompt:
            raise wrong("continue_final_message", "excludes add_generation_prompt")
    if isinstance(request, CompletionRequest):
        if request.best_of is not None and request.best_of < (request.n or 1):
            raise wrong("best_of", f"{request.best_of} is less than n = {request.n}")
        if request.best_of is not None and request.best_of > (request.n or 1) and request.stream:
            raise wrong("best_of", "cannot be streamed when it is more than n")
        if request.resume_token_ids is not None and (request.echo or request.best_of not in (None, request.n or 1)):
            raise wrong("resume_token_ids", "cannot be combined with echo or best_of")
    if request.prompt_logprobs is not None and request.stream:
        raise wrong("prompt_logprobs", "not available in a stream")
    if request.resume_token_ids is not None and request.prompt_logprobs is not None:
        raise wrong("resume_token_ids", "cannot be combined with prompt_logprobs")
    if request.response_format is not None and request.structured_outputs is not None:
        raise wrong("structured_outputs", "excludes response_format")


def stop_strings(request: GenerationRequest) -> list[str]:
    """`stop` as a list without repeats, in order."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return list(dict.fromkeys(stops))


class TenantGate:
    """One router's count of what its tenants are doing: requests at a time, tokens in the last minute.

    The token rate is a leaky bucket that holds one minute's worth. A request is let in while the bucket has room, and
    pays for its prompt at once and for what it generates when it ends; so a bucket may run into debt, never by more
    than what is running.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[str, int] = {}
        self._debt: dict[str, tuple[float, float]] = {}  # tokens owed, at time

    @contextmanager
    def enter(self, tenant: Tenant) -> Iterator[None]:
        """Hold one of the tenant's places. Raises RateLimited."""
        running = self._running.get(tenant.name, 0)
        if tenant.max_concurrency and running >= tenant.max_concurrency:
            raise RateLimited(f"{running} requests of this key are running, and its limit is {running}.", 1.0)
        if tenant.max_tokens_per_minute:
            over = self._owed(tenant) - tenant.max_tokens_per_minute
            if over >= 0:
                wait_s = (over + 1) * 60 / tenant.max_tokens_per_minute
                raise RateLimited(
                    f"This key has had its {tenant.max_tokens_per_minute} tokens a minute; wait {wait_s:.0f} s.",
                    wait_s,
                )
        self._running[tenant.name] = running + 1
        try:
            yield
        finally:
            self._leave(tenant.name)

    def spend(self, tenant: Tenant, num_tokens: int) -> None:
        """Tokens were used."""
        if tenant.max_tokens_per_minute:
            self._debt[tenant.name] = (self._owed(tenant) + num_tokens, self._clock())

    def _leave(self, name: str) -> None:
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]

    def _owed(self, tenant: Tenant) -> float:
        owed, at_s = self._debt.get(tenant.name, (0.0, 0.0))
        return max(0.0, owed - (self._clock() - at_s) * tenant.max_tokens_per_minute / 60)
