"""A request object becomes a job: every check, the template, the tokenizer, the sampling parameters."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from orcaserve.cluster.app_config import ApiLimits
from orcaserve.cluster.app_job import Choice, Ended, Job, Part
from orcaserve.cluster.auth import Tenant
from orcaserve.cluster.chat import ChatTemplate
from orcaserve.cluster.errors import ModelNotFound
from orcaserve.cluster.limits import check_fields, stop_strings
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.protocol import GenerationRequest
from orcaserve.cluster.protocol_chat import ChatCompletionRequest, Message
from orcaserve.cluster.protocol_completions import CompletionRequest
from orcaserve.cluster.protocol_schema import grammar_of
from orcaserve.cluster.text import TextCodec
from orcaserve.cluster.text_grammar import GrammarChecker
from orcaserve.engine.errors import ContextLengthExceeded, InvalidParameter
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.sampling import Grammar, SamplingParams

_GREEDY_BELOW = 1e-5  # a temperature or top_p this small leaves the best token alone
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class Preparer:
    """One per router; holds what all requests share."""

    def __init__(
        self,
        model: ModelInfo,
        codec: TextCodec,
        template: ChatTemplate | None,
        grammars: GrammarChecker,
        limits: ApiLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.model = model
        self.codec = codec
        self._template = template
        self._grammars = grammars
        self._limits = limits
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()

    async def chat(self, request: ChatCompletionRequest, tenant: Tenant) -> Job:
        """Raises RequestRefused."""
        self.check_model(request.model)
        check_fields(request, self._limits, self.model.vocab_size)
        text = self.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
        )
        [ids] = await self.encode([text], request.add_special_tokens or False, "messages")
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return await self._job("chat", request, tenant, [ids], wanted, num_logprobs, request.n or 1, None, "messages")

    async def completion(self, request: CompletionRequest, tenant: Tenant) -> Job:
        """Raises RequestRefused."""
        self.check_model(request.model)
        check_fields(request, self._limits, self.model.vocab_size)
        add_special = request.add_special_tokens is not False
        prompts = [
            (await self.encode([p], add_special, "prompt"))[0] if isinstance(p, str) else self.check_ids(p, "prompt")
            for p in request.prompts
        ]
        echo = None
        if request.echo:
            skip = request.skip_special_tokens is not False
            echo = [
                p if isinstance(p, str) else self.codec.decode(p, skip_special_tokens=skip) for p in request.prompts
            ]
        wanted = _COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        num_best = max(request.best_of or 1, request.n or 1)
        return await self._job(
            "completion", request, tenant, prompts, wanted, request.logprobs, num_best, echo, "prompt"
        )

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound."""
        if name is not None and name not in self.model.served_names:
            raise ModelNotFound

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        template_kwargs: dict[str, Any] | None,
    ) -> str:
        """A conversation as the text that the model reads."""
        if self._template is None:
            raise InvalidParameter("This model has no chat template; use /v1/completions.", "messages")
        going_on = bool(continue_final_message)
        return self._template.render(
            messages,
            add_generation_prompt=not going_on if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=going_on,
            template_kwargs=template_kwargs or {},
        )

    async def encode(self, texts: list[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """Refuses what is too long before it is tokenised, and what comes out empty."""
        num_chars = sum(map(len, texts))
        # No token is longer than the longest of the vocabulary, so that many characters cannot be fewer tokens.
        fewest = num_chars // self.codec.longest_token_chars
        if num_chars > self._limits.max_prompt_chars:
            raise InvalidParameter(
                f"{param}: {num_chars} characters, but this server allows {self._limits.max_prompt_chars}.", param
            )
        if fewest > self.model.max_model_len:
            raise ContextLengthExceeded(fewest, 0, self.model.max_model_len, param)
        return await self.codec.encode(texts, add_special_tokens=add_special_tokens)

    def check_ids(self, ids: list[int], param: str) -> list[int]:
        """The ids, or InvalidParameter."""
        if ids and max(ids) >= self.model.vocab_size:
            raise InvalidParameter(f"{param}: token ids go from 0 to {self.model.vocab_size - 1}.", param)
        return ids

    def _fitted(
        self, ids: list[int], request: GenerationRequest, wanted: int | None, param: str
    ) -> tuple[list[int], int]:
        """The prompt, cut where that was asked for, and how many tokens may follow it."""
        if request.truncate_prompt_tokens is not None:
            ids = ids[-request.truncate_prompt_tokens :]
        if not ids:
            raise InvalidParameter(f"{param}: an empty prompt has no tokens to start from.", param)
        room = self.model.max_model_len - len(ids)
        if room < (1 if wanted is None else wanted):
            raise ContextLengthExceeded(len(ids), 1 if wanted is None else wanted, self.model.max_model_len, param)
        return ids, room if wanted is None else wanted

    async def _job(
        self,
        kind: str,
        request: GenerationRequest,
        tenant: Tenant,
        prompts: list[list[int]],
        wanted: int | None,
        num_logprobs: int | None,
        num_best: int,
        echo: list[str] | None,
        param: str,
    ) -> Job:
        fitted = [self._fitted(ids, request, wanted, param) for ids in prompts]
        if request.min_tokens is not None and any(request.min_tokens > room for _, room in fitted):
            raise InvalidParameter(f"min_tokens: {request.min_tokens} is more than max_tokens.", "min_tokens")
        grammar = await self._grammar(request)
        stops = stop_strings(request)
        names = {i: stop for stop in stops if (i := self.codec.special_id_of(stop)) is not None}
        ranked = num_best > (request.n or 1)
        bad_words = await self._bad_words(request.bad_words or [])
        least_logprobs = 0 if ranked and num_logprobs is None else num_logprobs
        sampling = self._sampling(request, names, grammar, bad_words, least_logprobs)
        scoring = echo is not None and num_logprobs is not None
        prompt_logprobs = num_logprobs if scoring else request.prompt_logprobs
        job_id = ("chatcmpl-" if kind == "chat" else "cmpl-") + f"{self._rng.getrandbits(128):032x}"
        builder = _PartBuilder(self, request, tenant, stops, num_best, job_id, self._deadline_s(request))
        for prompt, (ids, max_tokens) in enumerate(fitted):
            # The engine always generates a token; with max_tokens 0 (score the prompt) it is dropped.
            builder.add(prompt, ids, sampling(max(1, max_tokens), prompt_logprobs))
        builder.check_resumed()
        options = request.stream_options
        return Job(
            kind="chat" if kind == "chat" else "completion",
            id=job_id,
            created=int(self._wall_clock()),
            model=request.model or self.model.name,
            prompts=[ids for ids, _ in fitted],
            parts=builder.parts,
            ended=builder.ended,
            num_choices=len(prompts) * (request.n or 1),
            num_per_prompt=num_best,
            n=request.n or 1,
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            want_logprobs=num_logprobs is not None,
            num_top_logprobs=num_logprobs or 0,
            want_prompt_logprobs=request.prompt_logprobs is not None,
            return_token_ids=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            echo=echo,
            stop_names=names,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            resumed=request.resume_token_ids is not None,
            echo_only=wanted == 0,
        )

    async def _grammar(self, request: GenerationRequest) -> Grammar | None:
        found = grammar_of(request, self._limits)
        if found is None:
            return None
        await self._grammars.check(*found)
        return found[0]

    async def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word as it begins a text and as it stands in one: with a space before it."""
        encoded = await self.codec.encode([s for word in words for s in _spellings(word)], add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _deadline_s(self, request: GenerationRequest) -> float | None:
        return None if request.deadline_ms is None else self._clock() + request.deadline_ms / 1000

    def _sampling(
        self,
        request: GenerationRequest,
        stop_names: dict[int, str],
        grammar: Grammar | None,
        bad_words: tuple[tuple[int, ...], ...],
        num_logprobs: int | None,
    ) -> Callable[[int, int | None], SamplingParams]:
        defaults = self.model.generation_defaults

        def value(field: str, otherwise: float) -> Any:
            given = getattr(request, field)
            return defaults.get(field, otherwise) if given is None else given

        temperature, top_p = float(value("temperature", 1.0)), float(value("top_p", 1.0))
        if temperature < _GREEDY_BELOW or top_p < _GREEDY_BELOW:
            temperature, top_p = 0.0, 1.0
        seed = self._rng.getrandbits(63) if request.seed is None else request.seed

        def build(max_tokens: int, prompt_logprobs: int | None) -> SamplingParams:
            return SamplingParams(
                max_tokens=max_tokens,
                seed=seed,
                temperature=temperature,
                top_p=top_p,
                top_k=min(max(0, int(value("top_k", 0))), self.model.vocab_size),
                min_p=float(value("min_p", 0.0)),
                min_tokens=request.min_tokens or 0,
                stop_token_ids=tuple(dict.fromkeys([*(request.stop_token_ids or ()), *stop_names])),
                ignore_eos=bool(request.ignore_eos),
                repetition_penalty=float(value("repetition_penalty", 1.0)),
                presence_penalty=request.presence_penalty or 0.0,
                frequency_penalty=request.frequency_penalty or 0.0,
                logit_bias=tuple((int(key), bias) for key, bias in (request.logit_bias or {}).items()),
                allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
                bad_words=bad_words,
                logprobs=num_logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
            )

        return build


def _spellings(word: str) -> tuple[str, ...]:
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)


class _PartBuilder:
    """Cuts a job into messages to the engine: one a prompt, or one a choice that goes on from a broken stream."""

    def __init__(
        self,
        preparer: Preparer,
        request: GenerationRequest,
        tenant: Tenant,
        stops: list[str],
        num_best: int,
        job_id: str,
        deadline_s: float | None,
    ) -> None:
        self.parts: list[Part] = []
        self.ended: list[Ended] = []
        self._preparer = preparer
        self._request = request
        self._tenant = tenant
        self._stops = stops
        self._num_best = num_best
        self._job_id = job_id
        self._deadline_s = deadline_s
        self._resumed = request.resume_token_ids
        self._known: set[str] = set()

    def add(self, prompt: int, ids: list[int], sampling: SamplingParams) -> None:
        """The messages for one prompt."""
        choices = {k: self._choice(prompt * self._num_best + k, ids) for k in range(self._num_best)}
        if self._resumed is not None:
            for k, choice in choices.items():
                if str(choice.index) in self._resumed:
                    self._known.add(str(choice.index))
                    self._resume(prompt, ids, sampling, k, choice, self._resumed[str(choice.index)])
        else:
            self._part(prompt, ids, sampling, choices)

    def check_resumed(self) -> None:
        """Every index in `resume_token_ids` must have been one of the choices."""
        if self._resumed is not None and (not self._resumed or self._resumed.keys() - self._known):
            raise InvalidParameter(
                "resume_token_ids: keys are indices of this request's choices, at least one.", "resume_token_ids"
            )

    def _choice(self, index: int, prompt_ids: list[int]) -> Choice:
        request = self._request
        decoder = self._preparer.codec.decoder(
            prompt_ids,
            self._stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=request.min_tokens or 0,
        )
        return Choice(index, decoder)

    def _resume(
        self, prompt: int, ids: list[int], sampling: SamplingParams, k: int, choice: Choice, so_far: list[int]
    ) -> None:
        if len(so_far) > sampling.max_tokens:
            raise InvalidParameter(
                f"resume_token_ids: {len(so_far)} ids, but max_tokens is {sampling.max_tokens}.", "resume_token_ids"
            )
        ended = self._ended_by(so_far, sampling)
        choice.decoder.push(so_far, hidden_last=ended is not None and ended[1] is not None)
        choice.num_tokens = len(so_far)
        if choice.decoder.stopped is not None:
            self.ended.append(Ended(choice, "stop", choice.decoder.stopped))
        elif ended is not None:
            self.ended.append(Ended(choice, "stop", None if ended[0] else ended[1]))
        elif len(so_far) == sampling.max_tokens:
            self.ended.append(Ended(choice, "length"))
        else:
            self._part(prompt, ids, sampling, {k: choice}, tuple(so_far))

    def _ended_by(self, so_far: list[int], sampling: SamplingParams) -> tuple[bool, int] | None:
        """(is it the model's own end, the token) when the last id ended the choice."""
        if not so_far or len(so_far) <= sampling.min_tokens:
            return None
        if so_far[-1] in self._preparer.model.eos_token_ids and not sampling.ignore_eos:
            return True, so_far[-1]
        return (False, so_far[-1]) if so_far[-1] in sampling.stop_token_ids else None

    def _part(
        self,
        prompt: int,
        ids: list[int],
        sampling: SamplingParams,
        choices: dict[int, Choice],
        so_far: tuple[int, ...] = (),
    ) -> None:
        request = self._request
        first = min(choices)
        message = GenerateRequest(
            request_id=f"{self._job_id}-{len(self.parts)}",
            prompt_token_ids=tuple(ids),
            sampling=sampling,
            output_token_ids=so_far,
            n=len(choices),
            choice_index=first,
            priority=request.priority or 0,
            tenant=self._tenant.name,
            cache_salt=request.cache_salt or "",
            deadline_s=self._deadline_s,
        )
        self.parts.append(Part(message, choices, prompt))
