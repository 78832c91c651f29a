"""Trace files in the published formats are read as they are; anything else is refused with file, line and column."""

import json
from pathlib import Path

import pytest

from orcaserve.loadtest.trace import BadTrace, TraceRow, read_trace

BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
120,GPT-4,1360,266,1626,API log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,879,55
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_burstgpt_without_its_failures(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, BURST))
    assert rows == [TraceRow(472, 18, 5.0), TraceRow(1087, 230, 45.0), TraceRow(1360, 266, 120.0)]


def test_azure_reads_seven_digits_of_a_second_and_both_years(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE))
    assert [(r.prompt_tokens, r.output_tokens) for r in rows] == [(374, 44), (396, 109), (879, 55)]
    assert rows[1].at_s - rows[0].at_s == pytest.approx(4.314579, abs=1e-5)


def test_sharegpt_pairs_questions_with_answers(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "four char" * 8},
        {"from": "gpt", "value": "answer " * 10},
        {"from": "human", "value": "and then?"},
        {"from": "gpt", "value": "nothing."},
        {"from": "human", "value": "no answer"},
    ]
    path = write(tmp_path, json.dumps([{"id": "x", "conversations": talk}, {"id": "y", "conversations": []}]))
    rows = read_trace(path, count_tokens=lambda text: len(text.split()))
    assert [(r.prompt_tokens, r.output_tokens, r.session) for r in rows] == [(9, 10, 0), (2, 1, 0)]
    assert rows[1].prompt == "and then?"
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "neither"),
        ("Timestamp,Request tokens,Response tokens\n5,x,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2"),
        ("Timestamp,Request tokens,Response tokens\n5,1,0\n", "no usable rows"),
        ("{", "trace"),
        ('{"a": 1}', "list"),
        ('[{"x": 1}]', "entry 0"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadTrace, match=message):
        read_trace(write(tmp_path, text))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTrace, match=r"/binary: not a text"):
        read_trace(tmp_path / "binary")
    with pytest.raises(BadTrace, match="nowhere"):
        read_trace(tmp_path / "nowhere")
