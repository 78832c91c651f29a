"""Text from tokens: nothing lost, nothing twice, nothing of a stop string, however the tokens come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orcaserve.cluster.text import TextCodec
from orcaserve.cluster.text_decoder import TextDecoder
from orcaserve.cluster.text_stops import StopMatcher

SMALL = "abc"  # few letters, so that stop strings overlap themselves and each other


def naive_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The oracle: the first moment at which the text ends with a stop string; the longest one if several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text(SMALL, max_size=30),
    stops=st.lists(st.text(SMALL, min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=30),
)
def test_matcher_finds_what_the_oracle_finds(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    taken, at, found = "", 0, None
    for size in [*cuts, len(text) + 1]:
        piece = text[at : at + size]
        at += size
        if (match := matcher.feed(piece)) is not None:
            taken += piece[: match[0]]
            found = match[1]
            break
        taken += piece
        longest = max((k for s in stops for k in range(len(s)) if taken.endswith(s[:k])), default=0)
        assert matcher.num_held == longest
    want, stop = naive_cut(text, stops, include=True)
    assert found == stop
    assert taken == want


def drain(decoder: TextDecoder, ids: list[int], sizes: list[int]) -> list[str]:
    parts, at = [], 0
    for size in [*sizes, len(ids) + 1]:
        parts.append(decoder.push(ids[at : at + size]))
        at += size
        if decoder.stopped is not None:
            return parts
    return [*parts, decoder.finish()]


@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_151)), max_size=24),
    sizes=st.lists(st.integers(1, 3), max_size=10),
    skip=st.booleans(),
)
def test_the_parts_are_the_whole(codec: TextCodec, ids: list[int], sizes: list[int], skip: bool) -> None:
    decoder = codec.decoder([], [], skip_special_tokens=skip)
    assert "".join(drain(decoder, ids, sizes)) == codec.decode(ids, skip_special_tokens=skip)


@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_200)), max_size=24),
    sizes=st.lists(st.integers(1, 3), max_size=10),
    skip=st.booleans(),
)
def test_whole_tokens_come_as_the_library_gives_them(
    codec: TextCodec, ids: list[int], sizes: list[int], skip: bool
) -> None:
    quick = codec.decoder([], [], skip_special_tokens=skip)
    library = TextDecoder(
        codec.tokenizer,
        codec.special_ids,
        [],
        include_stop=False,
        skip_special_tokens=skip,
        min_tokens=0,
        context=[],
        whole_texts=None,
    )
    assert drain(quick, ids, sizes) == drain(library, ids, sizes)
    assert quick.num_tokens == library.num_tokens
    assert (quick.position, quick.released) == (library.position, library.released)


def test_most_tokens_need_no_stream(codec: TextCodec) -> None:
    ids = codec.encode_now(["Seven words that every reader has seen before"], add_special_tokens=False)[0]
    decoder = codec.decoder([], [])
    decoder._stream = None  # type: ignore[assignment]
    assert decoder.push(ids[:1]) + decoder.push(ids[1:]) == "Seven words that every reader has seen before"


@given(
    ids=st.lists(st.integers(0, 300), min_size=1, max_size=24),
    sizes=st.lists(st.integers(1, 3), max_size=10),
    at=st.integers(0, 20),
    length=st.integers(1, 6),
    extra=st.text("abc 1", min_size=1, max_size=3),
    include=st.booleans(),
)
def test_no_part_of_a_stop_string_comes_out(
    codec: TextCodec, ids: list[int], sizes: list[int], at: int, length: int, extra: str, include: bool
) -> None:
    ids = [i for i in ids if i not in codec.special_ids]
    whole = codec.decode(ids, skip_special_tokens=True)
    stops = [stop for stop in (whole[at : at + length], extra) if stop]
    decoder = codec.decoder([], stops, include_stop=include)
    parts = drain(decoder, ids, sizes)
    want, stop = naive_cut(whole, stops, include)
    assert "".join(parts) == want
    assert decoder.stopped == stop


@given(
    ids=st.lists(st.integers(0, 300), max_size=20),
    stops=st.lists(st.text("abcdein \n", min_size=1, max_size=4), max_size=3),
    broken=st.integers(0, 20),
)
def test_a_replayed_decoder_goes_on_as_if_nothing_had_happened(
    codec: TextCodec, ids: list[int], stops: list[str], broken: int
) -> None:
    one = codec.decoder([], stops)
    before = "".join(one.push([i]) if one.stopped is None else "" for i in ids[:broken])
    again = codec.decoder([], stops)
    assert again.push(ids[:broken]) == before
    if one.stopped is None:
        assert again.push(ids[broken:]) + again.finish() == one.push(ids[broken:]) + one.finish()
    assert again.stopped == one.stopped


@pytest.mark.parametrize("text", ["ďábel", "🧪🦊", "日本語", "á", " two words", "a\u0301"])
def test_case_02_characters_that_span_tokens(codec: TextCodec, text: str) -> None:
    ids = codec.encode_now([text], add_special_tokens=False)[0]
    decoder = codec.decoder([], [])
    parts = [decoder.push([i]) for i in ids]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert decoder.finish() == ""


def test_case_02_a_character_that_is_never_completed_shows_at_the_end(codec: TextCodec) -> None:
    ids = codec.encode_now(["ab🧪"], add_special_tokens=False)[0][:-1]
    decoder = codec.decoder([], [])
    assert "".join(decoder.push([i]) for i in ids) == "ab"
    assert decoder.finish() == "\ufffd"


class TestCase11StopStringThatIsASpecialToken:
    def test_case_11_it_stops_and_does_not_show(self, codec: TextCodec) -> None:
        hello = codec.encode_now(["Hello there"], add_special_tokens=False)[0]
        decoder = codec.decoder([1, 2], ["<|im_end|>"])
        assert decoder.push([*hello, 2, *hello]) == "Hello there"
        assert decoder.stopped == "<|im_end|>"
        assert decoder.num_tokens == len(hello) + 1

    def test_case_11_as_the_first_token(self, codec: TextCodec) -> None:
        decoder = codec.decoder(codec.encode_now(["the last prompt token"], True)[0], ["<|im_end|>"])
        assert decoder.push([2]) == ""
        assert decoder.stopped == "<|im_end|>"
        assert decoder.finish() == ""

    def test_case_11_across_text_and_token(self, codec: TextCodec) -> None:
        hello = codec.encode_now(["Hello there"], add_special_tokens=False)[0]
        decoder = codec.decoder([], ["there<|im_end|>"])
        assert decoder.push(hello) == "Hello "
        assert decoder.push([2]) == ""
        assert decoder.stopped == "there<|im_end|>"
        flushed = codec.decoder([], ["there<|im_end|>"])
        assert flushed.push([*hello, *hello]) + flushed.finish() == "Hello thereHello there"

    def test_case_11_included_when_asked_for(self, codec: TextCodec) -> None:
        hello = codec.encode_now(["Hello there"], add_special_tokens=False)[0]
        decoder = codec.decoder([], ["<|im_end|>"], include_stop=True)
        assert decoder.push([*hello, 0, 2]) == "Hello there<|im_end|>"

    def test_case_11_a_special_token_inside_a_split_character(self, codec: TextCodec) -> None:
        first, *rest = codec.encode_now(["🧪"], add_special_tokens=False)[0]
        decoder = codec.decoder([], ["<|im_end|>"])
        assert decoder.push([first, 0, *rest]) == "🧪"
        assert decoder.stopped is None


def test_case_23_a_stop_in_the_middle_of_an_accepted_draft(codec: TextCodec) -> None:
    ids = codec.encode_now(["a b c a b c"], add_special_tokens=False)[0]
    decoder = codec.decoder([], [" c"])
    assert decoder.push(ids) == "a b"
    assert decoder.stopped == " c"
    assert decoder.num_tokens == 3  # up to the one that completed it; what follows counts for nothing


def test_min_tokens_lets_earlier_stop_strings_pass(codec: TextCodec) -> None:
    ids = codec.encode_now(["a b c a b c"], add_special_tokens=False)[0]
    decoder = codec.decoder([], [" c"], min_tokens=4)
    assert decoder.push(ids) == "a b c a b"
    assert decoder.num_tokens == 6


@pytest.mark.parametrize("token_id", [2, 28, 198, 10813, 117])
def test_single_tokens_have_text_and_bytes(codec: TextCodec, token_id: int) -> None:
    text, raw = codec.token_text(token_id)
    decoded = codec.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in decoded:
        assert text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    else:
        assert text == decoded
        assert raw.decode() == decoded


@given(text=st.text(max_size=60))
def test_the_tokens_bytes_are_the_texts(codec: TextCodec, text: str) -> None:
    ids = codec.encode_now([text], add_special_tokens=False)[0]
    if codec.decode(ids, skip_special_tokens=False) == text:  # the vocabulary lacks a few bytes
        assert b"".join(codec.token_text(i)[1] for i in ids) == text.encode()
