"""Readers of published request traces: when a request came and how long its prompt and its answer were.

Formats, told apart by their header or first character:
- BurstGPT (Wang et al., arXiv 2401.17644): `Timestamp` in seconds, `Request tokens`, `Response tokens`.
- Azure LLM inference traces 2023 / 2024 (Patel et al., ISCA 2024; Stojkovic et al.): `TIMESTAMP` as date and time,
  `ContextTokens`, `GeneratedTokens`.
- ShareGPT: a JSON list of {"conversations": [{"from": "human" | "gpt", "value": text}, ...]}.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TokenCounter = Callable[[str], int]


class BadTrace(ValueError):
    """The file is not a trace that we know, or a row of it is broken: the message gives file, row and column."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `at_s` is None where the trace has no times; `prompt` is empty where it has no text."""

    prompt_tokens: int
    output_tokens: int
    at_s: float | None = None
    session: int = -1  # rows of one conversation, in order; -1: on its own
    prompt: str = ""


def approximate_tokens(text: str) -> int:
    """Four characters a token: the usual rule for English, where no tokenizer is given."""
    return max(1, len(text) // 4)


def read_trace(path: Path, limit: int | None = None, count_tokens: TokenCounter = approximate_tokens) -> list[TraceRow]:
    """The trace's rows in time order; those without a prompt or an answer (BurstGPT's failures) are left out."""
    if not path.is_file():
        raise BadTrace(f"{path}: no such file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            start = file.read(1)
            file.seek(0)
            rows = list(_take(_sharegpt(file.read(), path, count_tokens) if start in "[{" else _csv(file, path), limit))
    except UnicodeDecodeError:
        raise BadTrace(f"{path}: not a text in UTF-8") from None
    if not rows:
        raise BadTrace(f"{path}: no usable rows")
    return sorted(rows, key=lambda row: row.at_s) if rows[0].at_s is not None else rows  # type: ignore[arg-type, return-value]


def _take(rows: Iterator[TraceRow], limit: int | None) -> Iterator[TraceRow]:
    for index, row in enumerate(rows):
        if limit is not None and index >= limit:
            return
        yield row


def _csv(file: Iterator[str], path: Path) -> Iterator[TraceRow]:
    reader = csv.DictReader(file)
    names = set(reader.fieldnames or ())
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        columns = ("Timestamp", "Request tokens", "Response tokens")
        parse_time: Callable[[str], float] = float
    elif {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        columns, parse_time = ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_s
    else:
        raise BadTrace(f"{path}: columns {sorted(names)} are neither BurstGPT's nor an Azure LLM trace's")
    for number, cells in enumerate(reader, start=2):
        try:
            at_s, prompt, output = parse_time(cells[columns[0]]), int(cells[columns[1]]), int(cells[columns[2]])
        except (TypeError, ValueError) as error:
            raise BadTrace(f"{path}, line {number}: {error}") from error
        if prompt > 0 and output > 0:
            yield TraceRow(prompt, output, at_s)


def _date_s(text: str) -> float:
    """Azure writes seven digits of a second, one more than Python reads."""
    head, _, fraction = text.strip().partition(".")
    digits = fraction.split("+")[0].rstrip("Z")
    stamp = datetime.fromisoformat(head.replace("Z", "") + "+00:00")
    return stamp.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _sharegpt(text: str, path: Path, count_tokens: TokenCounter) -> Iterator[TraceRow]:
    try:
        conversations = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTrace(f"{path}: {error}") from error
    if not isinstance(conversations, list):
        raise BadTrace(f"{path}: ShareGPT is a JSON list, this is a {type(conversations).__name__}")
    for session, conversation in enumerate(conversations):
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list):
            raise BadTrace(f"{path}: entry {session} has no list `conversations`")
        for asked, answered in itertools.pairwise(turns):
            if asked.get("from") in ("human", "user") and answered.get("from") in ("gpt", "assistant", "chatgpt"):
                prompt, answer = str(asked.get("value", "")), str(answered.get("value", ""))
                if prompt and answer:
                    yield TraceRow(count_tokens(prompt), count_tokens(answer), None, session, prompt)
