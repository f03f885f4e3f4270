"""Incremental text: whole characters only, cut off before a stop string."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.text import MAX_CHARACTER_BYTES, MAX_PENDING, Detokenizer

REPLACEMENT = "\ufffd"
# Byte pairs are learned from this text only, so every character outside ASCII is 2 to 4 tokens.
TRAINING_TEXT = [
    "def main():\n    print('hello world')\n",
    "the answer is 42, the end",
    "Question: how many?",
]
TEXTS = {
    "ascii": "the answer is 42, hello world",
    "accents": "café déjà vu, naïve Ångström",
    "cjk": "日本語のテキスト and 漢字",
    "emoji": "ok 👍🏽 done 👩‍👩‍👧‍👦!",
    "mixed": "print('héllo 世界 🎉')\n",
    "spaces": "  two  spaces\n\n\ttab ",
}


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


TOKENIZER = build_tokenizer()
VOCABULARY = TOKENIZER.get_vocab()
END = VOCABULARY["<|end|>"]


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def pieces_of(ids: list[int], *, prompt: str = "", stops: tuple[str, ...] = ()) -> list[str]:
    """What every token adds, until stopped; the last element is the flush."""
    detokenizer = Detokenizer(TOKENIZER, encode(prompt), stops)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("prompt", ["", "Q: 世界?", "one two three four five six seven eight nine"])
def test_joined_pieces_equal_decode(text: str, prompt: str) -> None:
    pieces = pieces_of(encode(text), prompt=prompt)
    assert "".join(pieces) == text == TOKENIZER.decode(encode(text))
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_comes_with_its_last_token() -> None:
    ids = encode("👍")
    assert len(ids) == 4  # one token a byte, or the test tests nothing
    assert pieces_of(ids) == ["", "", "", "👍", ""]


def test_half_a_character_at_the_end_is_a_replacement_in_the_end() -> None:
    *pieces, end = pieces_of(encode("ok 👍")[:-1])
    assert ("".join(pieces), end) == ("ok ", REPLACEMENT)


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_only_what_may_become_a_character_is_held_back(stops: tuple[str, ...]) -> None:
    """The text follows its tokens at a constant distance, which fits into as many tokens as are decoded."""
    thumb = one_token_a_byte("👍")
    lone, genuine = thumb[1:2], one_token_a_byte(REPLACEMENT)
    within = [*lone * 30, *thumb[:3], *[END] * 30, *thumb[3:]]  # special tokens are not in its way
    for ids in (lone * 60, genuine * 40, thumb[:3] * 40, [END, *lone] * 30, within):
        detokenizer, text = Detokenizer(TOKENIZER, [], stops), ""
        for count, token_id in enumerate(ids, 1):
            text += detokenizer.push(token_id)
            assert len(TOKENIZER.decode(ids[:count])) - len(text) <= MAX_CHARACTER_BYTES - 1
            assert len(detokenizer._pending) <= MAX_PENDING
        assert text + detokenizer.flush() == TOKENIZER.decode(ids)
        # What is held back can still become a character.
        assert "".join(pieces_of([*ids, *thumb])) == TOKENIZER.decode([*ids, *thumb])


def test_bytes_that_are_no_character_become_a_replacement() -> None:
    lone = encode("é")[1]  # a continuation byte without its start
    assert "".join(pieces_of([lone, *encode("ok")])) == REPLACEMENT + "ok"


@settings(max_examples=60)
@given(text=st.text(max_size=12), prompt=st.text(max_size=6))
@example(text="a\ufffd", prompt="\ufffd" * 5)
def test_any_text_round_trips(text: str, prompt: str) -> None:
    assert "".join(pieces_of(encode(text), prompt=prompt)) == text


DEMO = Tokenizer.from_file(str(Path(__file__).resolve().parents[2] / "demo" / "backbone" / "tokenizer.json"))


@pytest.mark.parametrize("tokenizer", [TOKENIZER, DEMO], ids=["bytes", "demo"])
def test_any_tokens_make_the_text_of_one_decode(tokenizer: Tokenizer) -> None:
    """Bytes that are no text, special tokens and characters in pieces, in any order."""
    vocabulary = tokenizer.get_vocab()
    characters = bytes_to_unicode()
    # One token a byte, of four bytes that are parts of characters, and four that can be none.
    parts = [vocabulary[characters[byte]] for byte in (*"👍".encode(), *"é".encode(), 0xFF, 0x41)]
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    token_ids = st.sampled_from(parts) | st.sampled_from([*special, *sorted(vocabulary.values())])

    @settings(max_examples=150)
    @given(ids=st.lists(token_ids, max_size=40), stop=st.text("aA é👍\ufffd", max_size=2))
    def check(ids: list[int], stop: str) -> None:
        detokenizer = Detokenizer(tokenizer, [], (stop,) if stop else ())
        pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
        text = tokenizer.decode(ids)
        assert "".join(pieces) == (text.partition(stop)[0] if stop else text)

    check()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_is_not_repeated(kept: int) -> None:
    prompt = [*encode("some prompt "), *encode("👍")[:kept]]
    detokenizer = Detokenizer(TOKENIZER, prompt, ())
    pieces = [detokenizer.push(token_id) for token_id in [*encode("👍")[kept:], *encode(" ok")]]
    assert "".join(pieces) == "👍 ok"


def test_special_tokens_have_no_text() -> None:
    assert "".join(pieces_of([END, *encode("ok"), END])) == "ok"
    detokenizer = Detokenizer(TOKENIZER, [END], ())
    assert "".join(detokenizer.push(token_id) for token_id in encode("ok")) == "ok"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello world and on", (" and",), "hello world"),  # spans several tokens
        ("hello world", ("he",), ""),  # at the start
        ("hello world", ("hello world",), ""),  # the whole text
        ("hello world", ("ld",), "hello wor"),  # at the end
        ("aaab rest", ("aab",), "a"),  # a failed match holds the start of the right one
        ("abababc rest", ("ababc",), "ab"),
        ("one\n\ntwo", ("\n\n",), "one"),
        ("the 42, 43", ("43", "42"), "the "),  # the earliest wins, whatever the order
        ("hello world", ("ld", "wo"), "hello "),  # the same where one token holds both
        ("the end 🎉 after", ("🎉",), "the end "),  # half a character can be no match
        ("Answer: 世界 rest", ("世界",), "Answer: "),
        ("hello world", ("worlds",), "hello world"),  # begun, never finished: flushed
        ("hello world", ("xyz",), "hello world"),
        ("hello", ("hellos", "lot", "o!"), "hello"),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], expected: str) -> None:
    assert "".join(pieces_of(encode(text), stops=stops)) == expected
    # The same with one token a byte, where every stop string spans tokens.
    assert "".join(pieces_of(one_token_a_byte(text), stops=stops)) == expected


@settings(max_examples=80)
@given(text=st.text("ab ", max_size=12), stop=st.text("ab ", min_size=1, max_size=4))
def test_a_stop_string_cuts_where_a_search_finds_it(text: str, stop: str) -> None:
    pieces = pieces_of(encode(text), stops=(stop,))
    assert "".join(pieces) == text.partition(stop)[0]


def test_the_text_has_tokens_of_several_characters() -> None:
    """Guards the case above: " world" is one token."""
    assert len(encode(" world")) == 1


def test_nothing_of_a_stop_string_is_emitted_early() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ("hello!",))
    held = [detokenizer.push(token_id) for token_id in one_token_a_byte("hello")]
    assert held == [""] * 5
    assert not detokenizer.stopped
    assert [detokenizer.push(token_id) for token_id in one_token_a_byte(" x")] == ["hello ", "x"]
    assert detokenizer.flush() == ""


def test_after_a_stop_nothing_follows() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ("b",))
    emitted = [detokenizer.push(token_id) for token_id in one_token_a_byte("abcd")]
    assert emitted == ["a", "", "", ""]
    assert detokenizer.stopped
    assert detokenizer.flush() == ""


def test_flush_empties() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ("ab",))
    assert detokenizer.push(encode("a")[0]) == ""
    assert detokenizer.flush() == "a"
    assert detokenizer.flush() == ""


def one_token_a_byte(text: str) -> list[int]:
    """The byte tokens of ``text``, without any merge."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [VOCABULARY[char] for piece, _ in byte_level.pre_tokenize_str(text) for char in piece]


BYTES = [0x0A, 0x20, 0x41, 0x80, 0x96, 0xB8, 0xE4, 0xE5, 0xF0, 0xFF]
WORDS = ["a", "\u2581", "\u2581the", "end", "\u2581\u2581"]


def build_byte_fallback() -> Tokenizer:
    """Like Llama's: words with a mark for the space, and a token for every byte."""
    pieces = ["<unk>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


BYTE_FALLBACK = build_byte_fallback()
FALLBACK_VOCABULARY = BYTE_FALLBACK.get_vocab()
WORD_IDS = [FALLBACK_VOCABULARY[word] for word in WORDS]


def byte_ids(values: bytes | list[int]) -> list[int]:
    return [FALLBACK_VOCABULARY[f"<0x{byte:02X}>"] for byte in values]


def joined(prompt: list[int], ids: list[int]) -> str:
    detokenizer = Detokenizer(BYTE_FALLBACK, prompt, ())
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def decoded_after(prompt: list[int], ids: list[int]) -> str:
    """What one decode makes of ``ids``."""
    return str(BYTE_FALLBACK.decode([*prompt, *ids])[len(BYTE_FALLBACK.decode(prompt)) :])


def test_invalid_bytes_after_a_byte_that_was_emitted() -> None:
    """One decode has two replacements; the line break had left before the second byte came."""
    ids = [*byte_ids([0x0A, 0xE5]), *WORD_IDS]
    assert decoded_after(WORD_IDS[:1], ids).startswith(REPLACEMENT * 2 + "a")
    assert joined(WORD_IDS[:1], ids) == "\n" + REPLACEMENT + "a  theend  "


runs = (
    st.lists(st.sampled_from(BYTES), max_size=5)
    | st.lists(st.sampled_from(BYTES), min_size=MAX_PENDING - 1, max_size=2 * MAX_PENDING)
    | st.text("a\n\u00e9\u4e16", max_size=3).map(lambda text: list(text.encode()))
)


@settings(max_examples=300)
@given(parts=st.lists(st.tuples(runs, st.sampled_from(WORD_IDS)), max_size=6))
def test_byte_fallback_equals_decode_where_nothing_was_emitted_before(
    parts: list[tuple[list[int], int]],
) -> None:
    """Of every run of bytes the whole characters at its start are emitted; one decode replaces them."""
    prompt, expected, all_ids, same = [WORD_IDS[0]], "", [], True
    for run, word in parts:
        valid = max(length for length in range(len(run) + 1) if is_utf8(run[:length]))
        expected += bytes(run[:valid]).decode() + REPLACEMENT * (len(run) - valid)
        expected += decoded_after(prompt, [word])
        same &= valid in (0, len(run))
        all_ids += [*byte_ids(run), word]
    assert joined(prompt, all_ids) == expected
    assert (expected == decoded_after(prompt, all_ids)) == same


def is_utf8(values: list[int]) -> bool:
    try:
        bytes(values).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("kept", range(4))
@pytest.mark.parametrize("before", ["\u4e16" * 5, "\u00e9" * 7, "a\n"])
def test_a_prompt_of_byte_tokens_is_not_repeated(before: str, kept: int) -> None:
    """Its last tokens may begin within a character, which makes the whole run of them invalid."""
    thumb = byte_ids("\U0001f44d".encode())
    prompt = [*byte_ids(before.encode()), *thumb[:kept]]
    assert joined(prompt, [*thumb[kept:], *WORD_IDS[:1]]) == "\U0001f44da"
