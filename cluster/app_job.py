"""A validated request, ready for the engine: prompts as ids, sampling parameters, one decoder a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orcaserve.cluster.text_decoder import TextDecoder
from orcaserve.engine.messages import FinishReason, GenerateRequest, TokenLogprobs


@dataclass(slots=True)
class Choice:
    """One answer in the making. `index` is its place in the response."""

    index: int
    decoder: TextDecoder
    num_tokens: int = 0  # generated, those of an earlier try included
    finished: bool = False
    sum_logprobs: float = 0.0
    started: bool = False
    held_logprobs: list[tuple[int, int, TokenLogprobs]] = field(default_factory=list)  # their text's start and end


@dataclass(frozen=True, slots=True)
class Part:
    """One message to the engine, and the choices that its deltas belong to."""

    request: GenerateRequest
    choices: dict[int, Choice]  # by the engine's choice index
    prompt: int  # which of the job's prompts


@dataclass(frozen=True, slots=True)
class Ended:
    """A resumed choice that needs no more tokens: it had ended when its stream broke."""

    choice: Choice
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the answer depends on, beside the engine."""

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    prompts: list[list[int]]
    parts: list[Part]
    ended: list[Ended]
    num_choices: int  # of the response, each prompt's n
    num_per_prompt: int  # choices generated for each prompt (best_of)
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    want_logprobs: bool
    num_top_logprobs: int
    want_prompt_logprobs: bool
    return_token_ids: bool
    tokens_as_ids: bool
    echo: list[str] | None  # the prompts' texts
    stop_names: dict[int, str]  # special tokens that were asked for as stop strings
    include_stop: bool
    skip_special_tokens: bool
    resumed: bool
    echo_only: bool  # max_tokens 0: only the prompt is wanted


@dataclass(slots=True)
class Piece:
    """What one delta adds to one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[tuple[int, TokenLogprobs]]  # with the offset of the token's text in the answer's
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt: int = 0
    first: bool = False  # nothing came before it for this choice
