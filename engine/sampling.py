"""How the next token is chosen: the sampling part of a request, as it travels on the wire."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Output constraint. `spec` is the schema, the pattern or the EBNF text; for `choice` a JSON list of strings."""

    kind: GrammarKind
    spec: str = ""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Names and ranges are OpenAI's and vLLM's; the router validates them, everything behind it trusts them.

    `seed` is always set here: the router draws one for a request that came without, so that a request which moves
    to another worker continues with the same noise. The noise of a token depends on (seed, position, choice index).
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is no limit
    min_p: float = 0.0
    min_tokens: int = 0  # no eos and no stop token before this many
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own eos ids
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty is all
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id is banned where the text ends with those before it
    logprobs: int | None = None  # None is none; 0 is the chosen token's only; n adds the n best
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
