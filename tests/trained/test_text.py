"""The tokens of a text are those of its files in order, whatever its size, its packing and where pieces are cut."""

import gzip
import json
import lzma
import os
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunus.trained.corpus import find_corpus, spread_stretches
from prunus.trained.text import read_text, write_tokens
from prunus.trained.tokens import read_tokens

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
DATA = Path(os.environ.get("PRUNUS_DATA", "nowhere"))
PACK = {".gz": gzip.compress, ".xz": lzma.compress}
END, ALL = 0, 2**62
TEXTS = {
    "lines": "The cat sat on the mat.\nThe dog did not.\n\n  The end\n" * 3,
    "one line": "the cat sat on the mat and " * 8,
    "one word": "abracadabra" * 12,
    "wide letters": "猫が好き🐈" * 9,
    "Windows": "the cat\r\nsat\r\n" * 9,
    "old Mac": "the\rcat\r" * 9,
    "line ends alone": "\r\n" * 40 + "\r" * 9 + "\n" * 30,
    "byte order mark": "\ufeffthe cat\n" * 5,
    "one letter": "x",
}


def byte_tokenizer(inner):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


@pytest.fixture(scope="module")
def tokenizer():
    """Reads bytes and the commonest pairs of them, so that every text comes back from its tokens."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXTS["lines"]], trainer)
    return byte_tokenizer(inner)


class Lengths:
    """Makes one token of a piece, its length, in no time."""

    eos_token_id = None

    def __call__(self, texts, **_):
        return {"input_ids": [[len(text)] for text in texts]}


@pytest.fixture
def small_pieces(monkeypatch):
    def set_sizes(whole, piece):
        monkeypatch.setattr("prunus.trained.corpus.WHOLE", whole)
        monkeypatch.setattr("prunus.trained.text.WHOLE", whole)
        monkeypatch.setattr("prunus.trained.corpus.PIECE", piece)

    return set_sizes


def written(text, tokenizer, to, most=ALL):
    write_tokens(text, tokenizer, to, most)
    ids = read_tokens(to)
    assert ids.dtype == np.dtype("<u4")
    return ids.tolist()


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_gives_the_tokens_of_its_text(name, tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXTS[name].encode())
    expected = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
    assert written(path, tokenizer, tmp_path / "a.u32") == expected
    ids, notes = read_text(path, tokenizer)
    assert ids.tolist() == expected and not notes


@pytest.mark.parametrize("name", TEXTS)
def test_the_pieces_of_a_file_decode_to_its_text_wherever_they_are_cut(name, tokenizer, tmp_path, small_pieces):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXTS[name].encode())
    for size in (8, 9, 10, 11, 13, 16, 31):
        small_pieces(size, size)
        assert decoded(tokenizer, written(path, tokenizer, tmp_path / "a.u32")) == path.read_text(encoding="utf-8")


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="PRUNUS_DATA names no folder with tokenizers")
def test_the_pieces_of_a_real_text_are_cut_where_the_tokenizer_cuts(tmp_path, small_pieces):
    vocabulary, merges = (str(DATA / "tokenizers" / name) for name in ("gpt2_vocab.json", "gpt2_merges.txt"))
    gpt2 = byte_tokenizer(tokenizers.ByteLevelBPETokenizer(vocabulary, merges)._tokenizer)
    text = (DATA / "text" / "tinystories_valid.txt").read_text(encoding="utf-8")[: 2**16]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    expected = gpt2.encode(text, add_special_tokens=False)
    assert written(tmp_path / "a.txt", gpt2, tmp_path / "a.u32") == expected
    small_pieces(2**14, 2**10)
    ids = written(tmp_path / "a.txt", gpt2, tmp_path / "a.u32")
    assert decoded(gpt2, ids) == text and abs(len(ids) - len(expected)) <= 128


def test_a_folder_gives_the_tokens_of_its_files_in_order(tokenizer, tmp_path):
    folder, ids = tmp_path / "text", []
    for name in ("a.txt", "b/a.md", "b/c/d", "b.txt", "empty.txt", "z.jsonl"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            {"empty.txt": "", "z.jsonl": '{"text": "one"}\n\n{"text": "two"}'}.get(name, f"This is {name}\n")
        )
    for text in ("This is a.txt\n", "This is b.txt\n", "This is b/a.md\n", "This is b/c/d\n", "one", "two"):
        ids += [END] * bool(ids) + tokenizer.encode(text, add_special_tokens=False)
    assert written(folder, tokenizer, tmp_path / "a.u32") == ids
    assert read_text(folder, tokenizer)[0].tolist() == ids


def test_hidden_files_links_and_what_is_no_text_are_left_out_and_counted(tokenizer, tmp_path):
    folder = tmp_path / "text"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.txt").write_text("the cat")
    (folder / ".hidden").write_text("no")
    (folder / ".git" / "a.txt").write_text("no")
    (tmp_path / "outside.txt").write_text("no")
    (folder / "binary").write_bytes(b"text\0text")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "cut.txt").write_bytes("é".encode()[:1])
    (folder / "photo.gz").write_bytes(gzip.compress(b"\xff\xd8\xff\0"))
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "folder").symlink_to(tmp_path)
    ids, notes = read_text(folder, tokenizer)
    assert decoded(tokenizer, ids) == "the cat"
    assert len(notes) == 1 and "6 of 7 files are left out" in notes[0]
    assert write_tokens(folder, tokenizer, tmp_path / "a.u32", ALL) == notes


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("most", [ALL, 400])
def test_packed_files_give_the_same_tokens(suffix, most, tokenizer, tmp_path):
    lines = [f"line {i} of the cat\n" for i in range(900)]
    contents = {"a.txt": "".join(lines), "b.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in lines)}
    for name, content in contents.items():
        for folder, ending, pack in (("plain", "", bytes), ("packed", suffix, PACK[suffix])):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / (name + ending)).write_bytes(pack(content.encode()))
    plain, packed = (written(tmp_path / name, tokenizer, tmp_path / "a.u32", most) for name in ("plain", "packed"))
    assert plain == packed


def write_numbers(folder, kind):
    """Lines with the numbers from 0 to 2,999, in one file or many."""
    folder.mkdir()
    lines = [f"number {i:04}\n" for i in range(3_000)]
    if kind == "files":
        for first in range(0, 3_000, 20):
            (folder / f"{first:04}.txt").write_text("".join(lines[first : first + 20]))
    elif kind == "jsonl":
        long = ("".join(lines[first : first + 5]) for first in range(0, 3_000, 5))
        (folder / "a.jsonl").write_text("".join(json.dumps({"about": "numbers", "text": text}) + "\n" for text in long))
    else:
        content = "".join(lines).encode()
        (folder / f"a.txt{kind}").write_bytes(PACK[kind](content) if kind else content)


@pytest.mark.parametrize("kind", ["", ".gz", "files", "jsonl"])
def test_most_takes_about_so_many_tokens_from_everywhere(kind, tokenizer, tmp_path):
    write_numbers(tmp_path / "text", kind)
    every = written(tmp_path / "text", tokenizer, tmp_path / "a.u32")
    for most in (5_000, len(every) * 3 // 4):
        ids = written(tmp_path / "text", tokenizer, tmp_path / "a.u32", most)
        assert 0.8 * most < len(ids) <= 1.1 * most
        numbers = list(map(int, re.findall(r"number (\d{4})", decoded(tokenizer, ids))))
        assert numbers == sorted(set(numbers)), "no line stands twice"
        tenths = np.bincount(np.array(numbers) // 300, minlength=10)
        assert numbers[0] == 0 and numbers[-1] > 2_980 and tenths.min() > 0.4 * tenths.max()
        again = written(tmp_path / "text", tokenizer, tmp_path / "b.u32", most)
        assert again == ids
    assert written(tmp_path / "text", tokenizer, tmp_path / "a.u32", 2 * len(every)) == every


@pytest.mark.parametrize("name", [name for name in TEXTS if "\r\n" not in TEXTS[name]])  # which a part may end inside
@pytest.mark.parametrize("pack", ["", ".gz"])
def test_a_part_of_a_corpus_is_made_of_passages_that_follow_each_other(name, pack, tmp_path, small_pieces, monkeypatch):
    for number, num in enumerate((3, 1, 5)):
        content = (TEXTS[name] * num).encode()
        (tmp_path / f"{number}.txt{pack}").write_bytes(PACK[pack](content) if pack else content)
    monkeypatch.setattr("prunus.trained.corpus.LEAST", 4)
    monkeypatch.setattr("prunus.trained.corpus.STRETCHES", 7)
    small_pieces(16, 9)
    corpus = find_corpus(tmp_path)
    every = "".join(piece.text for piece in corpus.pieces(spread_stretches(corpus.size, corpus.size)))
    assert every.startswith(TEXTS[name].replace("\r\n", "\n").replace("\r", "\n"))
    for wanted in range(1, corpus.size, 1 + corpus.size // 40):
        pieces, place = list(corpus.pieces(spread_stretches(corpus.size, wanted))), 0
        for piece in pieces:
            place = every.index(piece.text, place) + len(piece.text)
        assert sum(piece.num_bytes for piece in pieces) <= wanted


@given(size=st.integers(1, 10**12), share=st.floats(0, 1.1))
def test_stretches_do_not_overlap_and_reach_from_the_first_byte_to_the_last(size, share):
    wanted = max(1, min(int(size * share), 2**28))
    stretches = spread_stretches(size, wanted)
    assert stretches[0].begin == 0 and stretches[-1].until == size
    assert min(wanted, size) * 0.9 - 1 <= sum(stretch.num for stretch in stretches) <= wanted or wanted >= size
    for one, following in pairwise(stretches):
        assert one.begin + one.num <= one.until == following.begin
    if len(stretches) > 1:
        assert stretches[-1].begin + stretches[-1].num == size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_of_64_mib_takes_a_few_of_memory(name, tmp_path):
    line = "the cat sat on the mat\n" * 4000
    record = line if name == "a.txt" else json.dumps({"text": line}) + "\n"
    with (tmp_path / name).open("w") as file:
        for _ in range(2**26 // len(record)):
            file.write(record)
    tracemalloc.start()
    try:
        for most in (ALL, 100):
            write_tokens(tmp_path / name, Lengths(), tmp_path / "a.u32", most)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20


def test_of_a_long_text_a_part_is_held_in_memory_and_a_note_says_so(tokenizer, tmp_path, monkeypatch):
    write_numbers(tmp_path / "text", "")
    monkeypatch.setattr("prunus.trained.text.MOST_READ", 2**14)
    ids, notes = read_text(tmp_path / "text", tokenizer)
    text = decoded(tokenizer, ids[ids != END])
    assert 0.9 * 2**14 < len(text) <= 2**14 and "number 0000" in text and "number 2999" in text
    assert len(notes) == 1 and "45.5% of 0.0 MiB of text are read" in notes[0]


def test_documents_of_jsonl_are_cut_like_files_and_may_hold_any_letter(tokenizer, tmp_path, small_pieces):
    texts = ["one\r\ntwo 🐈" * 9, "", "half \ud800 of a pair", "\0"]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(json.dumps({"n": 1, "text": text}) for text in texts))
    expected = texts[0] + "<end>" + "half ? of a pair" + "<end>" + "\0"
    for size in (8, 13, 2**22):
        small_pieces(size, size)
        assert decoded(tokenizer, written(tmp_path / "a.jsonl", tokenizer, tmp_path / "a.u32")) == expected


BAD = {
    "nowhere": (None, "does not exist"),
    "empty.txt": (b"", "is empty"),
    "binary": (b"a\0b", "not UTF-8 text"),
    "latin.txt": (b"caf\xe9", "not UTF-8 text"),
    "tokens.u32": (np.arange(9, dtype="<u4").tobytes(), "give tokens with --tokens"),
    "cut.txt.gz": (gzip.compress(bytes(range(256)))[:-20], "not a complete .gz file"),
    "none.xz": (b"no such file", "not a complete .xz file"),
    "a.jsonl": (b'{"text": "a"}\n{"text": "b"\n', "a.jsonl, line 2: expected JSON"),
    "list.jsonl": (b'\n["text"]\n', 'line 2: expected an object with a string under "text", got ["text"]'),
    "number.jsonl": (b'{"text": 3}', 'line 1: expected an object with a string under "text"'),
    "deep.jsonl": (b"[" * 10**5, "line 1: expected JSON"),
    "binary.jsonl": (b"\xff\0", "not UTF-8 text"),
    "b.jsonl.gz": (gzip.compress(b"{}"), "b.jsonl.gz, line 1:"),
}


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(name, in_folder, tokenizer, tmp_path):
    content, message = BAD[name]
    folder = tmp_path / "text"
    folder.mkdir()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        write_tokens(folder if in_folder else folder / name, tokenizer, tmp_path / "a.u32", ALL)
    is_left_out = in_folder and any(word in message for word in ("does not exist", "empty", "UTF-8", "--tokens"))
    assert ("holds no text" if is_left_out else message) in str(error.value) and "\n" not in str(error.value)
    assert str(folder) in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_document_that_is_too_long_a_pipe_and_a_locked_file_are_refused(tokenizer, tmp_path, monkeypatch):
    to = tmp_path / "a.u32"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 99}))
    monkeypatch.setattr("prunus.trained.corpus.LONGEST_LINE", 99)
    with pytest.raises(ValueError, match="line 1: a document may have at most"):
        write_tokens(tmp_path, tokenizer, to, ALL)
    (tmp_path / "a.jsonl").chmod(0)
    if not os.access(tmp_path / "a.jsonl", os.R_OK):
        with pytest.raises(PermissionError, match=r"a\.jsonl"):
            write_tokens(tmp_path, tokenizer, to, ALL)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(ValueError, match="is a pipe"):
                write_tokens(path, tokenizer, to, ALL)
    assert not to.exists()


def test_a_text_without_tokens_is_refused(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "cat": 1}, "<end>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "a.txt").write_text(" \n ")
    for most in (ALL, 5):
        with pytest.raises(ValueError, match="holds no tokens"):
            write_tokens(tmp_path / "a.txt", byte_tokenizer(inner), tmp_path / "a.u32", most)
    assert not (tmp_path / "a.u32").exists()
