"""Text piece by piece: exactly the decode of all tokens, never half a character; stop strings across any boundary."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from steerscope.engines.detokenizer import Decoder, Detokenizer, StopStrings
from support import tiny

PROPERTY = settings(deadline=None, max_examples=80, derandomize=True)
KINDS = ["bytes", "metaspace"]
TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "  two  spaces   three",
    "🎉👩‍👩‍👧🏳️‍🌈",  # joined by ZWJ and variation selectors
    "你好世界 こんにちは 한국어",
    "e\u0301a\u0308 \u0928\u092e\u0938\u094d\u0924\u0947",  # combining marks
    "naïve café — “quotes”\n\ttabs",
    "\ufffd genuine \ufffd",
    "<0x41> looks like a byte token",
    "\x00\x7f\u200b",
]


@functools.cache
def decoder(kind: str) -> Decoder:
    return Decoder(tiny.tokenizer(kind))  # type: ignore[arg-type]


@functools.cache
def encoded(kind: str) -> tuple[tuple[int, ...], ...]:
    tokenizer = tiny.tokenizer(kind)
    return tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS)


def whole(kind: str, ids: list[int]) -> str:
    return str(tiny.tokenizer(kind).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@functools.cache
def raw_bytes(kind: str) -> list[int]:
    """Bytes as tokens: half characters, wrong continuations, all of it."""
    return sorted(decoder(kind).byte_ids) or [i for i in range(512) if whole(kind, [i]) == "\ufffd"]


@st.composite
def sequences(draw, kind: str) -> list[int]:
    """Whole and cut encodings, single tokens of the whole vocabulary, special tokens and byte tokens, in any order."""
    tokenizer = tiny.tokenizer(kind)
    single = st.integers(0, len(tokenizer) - 1)
    special = st.sampled_from(tokenizer.all_special_ids)
    text = st.sampled_from(encoded(kind))
    cut = st.builds(lambda ids, a, b: ids[a:b], text, st.integers(0, 8), st.integers(0, 12))
    part = st.one_of(
        text,
        cut,
        single.map(lambda i: (i,)),
        special.map(lambda i: (i,)),
        st.lists(st.sampled_from(raw_bytes(kind)), max_size=5),
    )
    return [i for ids in draw(st.lists(part, max_size=8)) for i in ids]


def stream(kind: str, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(decoder(kind))
    pieces = [detokenizer.push(i) for i in ids]
    return pieces, detokenizer.flush()


@pytest.mark.parametrize("kind", KINDS)
@settings(PROPERTY, max_examples=150)
@given(data=st.data())
def test_the_pieces_of_any_tokens_concatenate_to_exactly_the_decode_of_all(kind: str, data):
    ids = data.draw(sequences(kind))
    pieces, rest = stream(kind, ids)
    assert "".join(pieces) + rest == whole(kind, ids)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data())
def test_text_is_not_held_back_longer_than_it_can_change(kind: str, data):
    """After a token that has text of its own and ends a character, everything so far is out."""
    ids = data.draw(sequences(kind))
    detokenizer, shown = Detokenizer(decoder(kind)), ""
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.push(token)
        so_far = whole(kind, ids[:count])
        ordinary = token not in decoder(kind).byte_ids and whole(kind, [token])
        if ordinary and not so_far.endswith("\ufffd"):
            assert shown == so_far
        assert so_far.startswith(shown) or not ordinary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_kind_of_text_streams_as_itself(kind: str, text: str):
    ids = tiny.tokenizer(kind)(text, add_special_tokens=False)["input_ids"]
    pieces, rest = stream(kind, ids)
    assert "".join(pieces) + rest == whole(kind, ids)
    assert not [piece for piece in pieces if piece.endswith("\ufffd")]


def test_a_character_of_several_tokens_comes_out_once_it_is_whole():
    ids = tiny.tokenizer("bytes")("a𝄞b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6  # 𝄞 is four bytes, none of them merged
    assert stream("bytes", ids) == (["a", "", "", "", "𝄞", "b"], "")


def test_bytes_that_never_become_a_character_come_out_at_the_end():
    ids = tiny.tokenizer("bytes")("a𝄞", add_special_tokens=False)["input_ids"][:-1]
    pieces, rest = stream("bytes", ids)
    assert "".join(pieces) == "a"
    assert rest == "\ufffd"


def test_a_run_of_byte_tokens_is_judged_as_a_whole_even_across_a_skipped_special_token():
    """<0x41> alone is "A", but <0x41><0xFF> is two replacement characters: "A" must not be shown too early."""
    tokenizer = tiny.tokenizer("metaspace")
    vocab = tokenizer.get_vocab()
    ids = [vocab["<0x41>"], vocab["<|end|>"], vocab["<0xFF>"]]
    assert whole("metaspace", ids) == "\ufffd\ufffd"
    assert stream("metaspace", ids) == (["", "", ""], "\ufffd\ufffd")


def test_a_space_at_the_start_of_a_token_is_kept_except_before_the_first():
    tokenizer = tiny.tokenizer("metaspace")
    ids = tokenizer("the dog the dog", add_special_tokens=False)["input_ids"]
    pieces, rest = stream("metaspace", ids)
    assert "".join(pieces) + rest == "the dog the dog"


class Counting(Decoder):
    decoded = 0  # token ids

    def decode(self, ids) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


def endless(kind: str) -> dict[str, list[int]]:
    """Streams of 2,000 tokens that never reach a text that is certain, or have no text at all."""
    tokenizer = tiny.tokenizer(kind)
    vocab = tokenizer.get_vocab()
    found = {
        "special": [tokenizer.all_special_ids[-1]] * 2000,
        "unknown": [len(tokenizer) + 7] * 2000,
        "space": tokenizer(" ", add_special_tokens=False)["input_ids"] * 2000,
        "genuine": tokenizer(" \ufffd", add_special_tokens=False)["input_ids"] * 600,
    }
    if kind == "bytes":
        signs = {"lead": "ð", "continuation": "Ģ", "cut": "ðŁĺ"}  # F0; 80; F0 9F 98
        return found | {name: [vocab[sign] for sign in (text * 2000)[:2000]] for name, text in signs.items()}
    named = {"lead": ["F0"], "continuation": ["80"], "cut": ["F0", "9F", "98"]}
    return found | {name: [vocab[f"<0x{byte}>"] for byte in run] * 700 for name, run in named.items()}


ORDINARY = "ordinary"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [ORDINARY, *endless("bytes")])
def test_the_work_per_token_does_not_grow_with_the_text(kind: str, name: str):
    """Counted in token ids that are decoded: a few per token, not the whole text for each."""
    ordinary = [i for ids in encoded(kind)[:3] for i in ids] * 100
    ids = ordinary if name == ORDINARY else endless(kind)[name]
    counting = Counting(tiny.tokenizer(kind))  # type: ignore[arg-type]
    detokenizer = Detokenizer(counting)
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
    assert text == whole(kind, ids)
    assert counting.decoded < (6 if name == ORDINARY else 12) * len(ids) + 1000


# Beginnings of characters, continuations, bytes that are never valid, whole characters, and plain letters.
BYTES = [0x41, 0x20, 0x80, 0xBF, 0xA0, 0x9F, 0x90, 0x8F, 0xC0, 0xC3, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
CHUNKS = st.one_of(
    st.lists(st.sampled_from(BYTES), min_size=1, max_size=5).map(bytes),
    st.text("aé你😀\ufffd", min_size=1, max_size=3).map(str.encode),
    st.tuples(st.text("é你😀", min_size=2, max_size=4).map(str.encode), st.integers(1, 3), st.integers(1, 3)).map(
        lambda cut: cut[0][cut[1] : -cut[2]] or b"x"
    ),
)


class OfBytes:
    """A byte-level tokenizer with one token for each given chunk of bytes; its decode is Python's own."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, token_ids: list[int], **options: bool) -> str:
        del options
        return b"".join(self.chunks[i] for i in token_ids).decode(errors="replace")


@settings(PROPERTY, max_examples=600)
@given(chunks=st.lists(CHUNKS, max_size=40))
def test_tokens_that_cut_characters_anywhere_stream_as_the_decode_of_all_bytes(chunks: list[bytes]):
    counting = Counting(OfBytes(chunks))
    detokenizer, shown = Detokenizer(counting), ""
    for i in range(len(chunks)):
        shown += detokenizer.push(i)
        so_far = b"".join(chunks[: i + 1]).decode(errors="replace")
        assert shown == (so_far[:-1] if so_far.endswith("\ufffd") else so_far)
    assert shown + detokenizer.flush() == b"".join(chunks).decode(errors="replace")
    assert counting.decoded < 12 * len(chunks) + 1


@settings(PROPERTY, max_examples=60)
@given(chunks=st.lists(CHUNKS, min_size=1, max_size=30))
def test_the_same_holds_for_the_decoder_of_real_byte_level_tokenizers(chunks: list[bytes]):
    sign_of = bytes_to_unicode()
    names = list(dict.fromkeys("".join(sign_of[byte] for byte in chunk) for chunk in chunks))
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = [names.index("".join(sign_of[byte] for byte in chunk)) for chunk in chunks]
    detokenizer = Detokenizer(Decoder(tokenizer))  # type: ignore[arg-type]
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text == b"".join(chunks).decode(errors="replace")


# --- stop strings

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that is complete first, by plain str.find; of two that end together the longer."""
    hits = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(hits)[1:] if hits else None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@settings(PROPERTY, max_examples=250)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_any_split_of_a_text_ends_before_the_first_stop_string_and_shows_nothing_of_it(text, stops, cuts):
    finder, shown, seen = StopStrings(stops), "", ""
    for piece in split(text, cuts):
        shown += finder.push(piece)
        seen += piece
        if finder.found is not None:
            break
        # Held back is exactly the longest end that may still become a stop string.
        ends = [n for n in range(len(seen) + 1) if any(stop.startswith(seen[len(seen) - n :]) for stop in stops)]
        assert shown == seen[: len(seen) - max(ends)]
    hit = first_stop(text, stops)
    if hit is None:
        assert finder.found is None
        assert shown + finder.flush() == text
    else:
        assert (shown, finder.found) == (text[: hit[0]], hit[1])
        assert finder.flush() == ""


def test_text_and_stop_string_do_not_depend_on_how_the_text_was_cut():
    """ "bcd" is complete before "abcde" is, whether the text comes in one piece or letter by letter."""
    for pieces in (["xabcde"], list("xabcde"), ["xab", "cde"]):
        finder = StopStrings(["abcde", "bcd"])
        shown = ""
        for piece in pieces:
            shown += finder.push(piece)
            if finder.found:
                break
        assert (shown, finder.found) == ("xa", "bcd")


def test_without_stop_strings_every_piece_passes_at_once():
    finder = StopStrings([])
    assert [finder.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert finder.flush() == ""
    assert finder.found is None


def test_a_beginning_that_turns_out_to_be_none_is_let_go():
    finder = StopStrings(["<end>"])
    assert [finder.push(piece) for piece in ("a<", "en", "t", "<e", "nd", ">!")] == ["a", "", "<ent", "", "", ""]
    assert finder.found == "<end>"
