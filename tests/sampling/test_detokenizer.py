"""Detokenizer: text that comes in pieces equals text decoded at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniserve.sampling.detokenizer import Detokenizer, StopMatcher
from tests.server.tokenizers_for_tests import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
FIRST_PIECE = 3 + 256


def in_pieces(tokenizer, ids, sizes, **kwargs):
    detokenizer = Detokenizer(tokenizer, **kwargs)
    text, at = "", 0
    for size in sizes:
        text += detokenizer.push(ids[at : at + size])
        at += size
    text += detokenizer.push(ids[at:])
    return text + detokenizer.flush(), detokenizer


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=60),
    sizes=st.lists(st.integers(0, 5), max_size=60),
    skip=st.booleans(),
)
def test_random_byte_level_ids_decode_as_at_once(ids, sizes, skip):
    text, _ = in_pieces(BYTE_LEVEL, ids, sizes, skip_special_tokens=skip)
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


def sentencepiece_ids():
    piece = st.integers(FIRST_PIECE, len(SENTENCEPIECE) - 1).map(lambda i: [i])
    special = st.sampled_from([[1], [2]])
    character = st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + byte for byte in c.encode()])
    return st.lists(st.one_of(piece, special, character), max_size=40).map(
        lambda parts: [i for part in parts for i in part]
    )


@settings(max_examples=300, deadline=None)
@given(ids=sentencepiece_ids(), sizes=st.lists(st.integers(0, 5), max_size=60))
def test_sentencepiece_ids_decode_as_at_once(ids, sizes):
    text, _ = in_pieces(SENTENCEPIECE, ids, sizes)
    assert text == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["日本語 🙂🚀", "Grüße", "plain words, and more"])
def test_a_character_is_held_until_it_is_whole(text):
    ids = [3 + byte for byte in text.encode()]
    detokenizer = Detokenizer(SENTENCEPIECE)
    pieces = [detokenizer.push([i]) for i in ids]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "".join(pieces) == text, "the last character came out with its last byte, before any flush"


def test_broken_bytes_do_not_pile_up_work():
    broken = BYTE_LEVEL.convert_tokens_to_ids("Ģ")  # byte 0x80, a continuation without a beginning
    detokenizer = Detokenizer(BYTE_LEVEL)
    decoded = 0
    decode = detokenizer._decode

    def counting(ids):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    detokenizer._decode = counting
    ids = [broken] * 1000
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode(ids)
    assert decoded < 8 * len(ids), "each token may be looked at a few times, not once per later token"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=30),
)
def test_stop_strings_cut_the_same_however_the_text_is_split(text, stop, sizes):
    def run(pieces):
        matcher = StopMatcher(stop)
        return "".join([matcher.push(piece) for piece in pieces]) + matcher.flush(), matcher.found

    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    assert run([*pieces, text[at:]]) == run(list(text))
    cut, found = run(list(text))
    if found is None:
        assert cut == text and not any(s in text for s in stop)
    else:
        assert text.startswith(cut + found)
        assert not any(s in (cut + found)[:-1] for s in stop), "no stop string was complete before"


def test_stop_string_across_tokens_and_held_text():
    ids = BYTE_LEVEL("one STOP two").input_ids
    text, detokenizer = in_pieces(BYTE_LEVEL, ids, [1] * len(ids), stop=("STOP",))
    assert (text, detokenizer.stopped) == ("one ", "STOP")
    ids = BYTE_LEVEL("one STO").input_ids
    text, detokenizer = in_pieces(BYTE_LEVEL, ids, [1] * len(ids), stop=("STOP",))
    assert (text, detokenizer.stopped) == ("one STO", None)
    assert Detokenizer(BYTE_LEVEL, stop=("STOP",)).push(ids) == "one ", "a possible stop string is held back"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 4), max_size=30),
)
def test_stop_strings_that_are_complete_too_early_do_not_count(text, stop, least, sizes):
    ids = [BYTE_LEVEL.convert_tokens_to_ids(letter) for letter in text]

    def run(include_stop):
        detokenizer = Detokenizer(BYTE_LEVEL, stop, min_tokens=least, include_stop=include_stop)
        rest, out = list(ids), ""
        for size in [*sizes, len(ids)]:
            out += detokenizer.advance(rest[:size], None)[0]
            rest = rest[size:]
        return out + detokenizer.flush(), detokenizer.stopped

    ends = [(end, -len(s), s) for s in stop for end in range(least + 1, len(text) + 1) if text[:end].endswith(s)]
    end, _, found = min(ends, default=(len(text), 0, None))
    assert run(True) == (text[:end], found)
    assert run(False) == (text[: end - len(found or "")], found)


def test_earliest_match_wins():
    ids = BYTE_LEVEL("a b c d").input_ids
    text, detokenizer = in_pieces(BYTE_LEVEL, ids, [], stop=("d", "b", "c"))
    assert (text, detokenizer.stopped) == ("a ", "b")
    assert detokenizer.push(ids) == "" and detokenizer.flush() == ""
