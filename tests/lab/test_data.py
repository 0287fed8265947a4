"""Batches are pure functions of seed and step, epochs leave nothing out, and broken files are refused in one line."""

import gzip
import io
import json
import lzma
import os
import sys
import tracemalloc
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prunus.lab.data import Labelled, datasets, load
from prunus.lab.data.batches import crop_and_flip, image_data, permutation, token_data
from prunus.lab.data.datasets import LIMIT, joined, sources, split
from prunus.trained import tokens as token_files
from prunus.trained.tokens import read_tokens

MNIST = Path(os.environ.get("PRUNUS_DATA", "")) / "vision" / "mnist"


def tokens_of(num_train, context, num_held_out=50):
    return token_data(np.arange(num_train, dtype="<u2"), np.arange(num_held_out, dtype="<u2"), context, None)


def some_images(count, channels=1, size=8):
    draw = np.random.default_rng(count)
    return Labelled(draw.integers(0, 256, (count, channels, size, size), np.uint8), draw.integers(0, 10, count))


DATA = {
    "tokens": tokens_of(1000, 7),
    "one window": tokens_of(9, 7),
    "images": image_data(some_images(37), some_images(5)),
    "augmented": image_data(some_images(37, 3), some_images(5, 3), augment=True),
    "one image": image_data(some_images(1), some_images(1)),
}


@pytest.fixture(params=DATA)
def data(request):
    return DATA[request.param]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def joint(batches):
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def test_a_batch_does_not_depend_on_what_was_drawn_before(data):
    first = data.train.batch(5, 3, seed=1)
    for step, size, seed in [(0, 3, 1), (400, 7, 2), (6, 3, 1)]:
        data.train.batch(step, size, seed)
    assert equal(first, data.train.batch(5, 3, seed=1))
    permutation.cache_clear()
    torch.manual_seed(123)
    with torch.device("meta"):
        assert equal(first, data.train.batch(5, 3, seed=1))


def test_parts_of_a_batch_are_the_batches_of_ranks(data):
    for step, parts in ((0, 2), (1, 3), (2, 2), (40, 5)):
        ranks = [data.train.batch(step * parts + rank, 4, seed=3) for rank in range(parts)]
        assert equal(data.train.batch(step, 4 * parts, seed=3), joint(ranks))


@pytest.mark.parametrize("name", ["tokens", "images", "augmented"])
@pytest.mark.parametrize("other", [1, 2**32, 2**64, -1])
def test_two_seeds_and_two_epochs_differ(name, other):
    train = DATA[name].train
    epochs = [train.batch(step, len(train), seed) for step, seed in ((0, 0), (1, 0), (0, other))]
    assert not any(equal(one, two) for one, two in combinations(epochs, 2))


@settings(deadline=None, max_examples=60)
@given(num_tokens=st.integers(2, 300), context=st.integers(1, 20), size=st.integers(1, 40), epoch=st.integers(0, 3))
def test_each_epoch_takes_every_window_once(num_tokens, context, size, epoch):
    assume(num_tokens > context)
    train, window = tokens_of(num_tokens, context).train, context + 1
    steps = range((epoch + 1) * len(train) // size + 1)
    inputs, targets = joint(train.batch(step, size, seed=5) for step in steps)
    starts = sorted(inputs[epoch * len(train) : (epoch + 1) * len(train), 0].tolist())
    assert starts == list(range(starts[0], starts[0] + len(train) * window, window))
    assert num_tokens - len(train) * window < 2 * window
    assert torch.equal(inputs + 1, targets)
    assert targets.max() < num_tokens


def test_the_offset_takes_every_value():
    train = DATA["tokens"].train
    assert {int(train.batch(epoch, len(train), seed=0)[0].min()) for epoch in range(200)} == set(range(8))


@pytest.mark.parametrize("size", [1, 5, 37, 100])
def test_each_epoch_takes_every_image_once(size):
    images = Labelled(some_images(37).pixels, np.arange(37))
    train = image_data(images, images).train
    labels = torch.cat([train.batch(step, size, seed=4)[1] for step in range(2 * 37 // size + 1)])
    assert labels[:37].sort().values.tolist() == list(range(37)) == labels[37:74].sort().values.tolist()


@pytest.mark.parametrize("limit", [None, 1, 3, 1000])
@pytest.mark.parametrize("size", [1, 4, 50])
def test_validation_is_in_order_and_a_limit_takes_the_first(data, size, limit):
    whole, batches = joint(data.validation(1)), list(data.validation(size, limit))
    assert all(len(targets) == size for _, targets in batches[:-1])
    assert equal(joint(batches), tuple(part[:limit] for part in whole))
    assert equal(joint(batches), joint(data.validation(size, limit)))


@pytest.mark.parametrize("num_tokens", [8, 14, 15, 50])
def test_validation_predicts_every_token_once(num_tokens):
    targets = torch.cat([targets for _, targets in tokens_of(1000, 7, num_tokens).validation(2)]).flatten()
    assert targets.tolist() == list(range(1, 1 + (num_tokens - 1) // 7 * 7))


def write(folder, name, content):
    packers = {".gz": gzip.compress, ".xz": lzma.compress}
    (folder / name).write_bytes(packers.get(Path(name).suffix, bytes)(content))
    return folder / name


TEXT = ("prune, plüm, 梅\n" * 40).encode() + bytes(range(256))
GPT2 = np.random.default_rng(0).permutation(50257).astype("<u2").tobytes()
SUFFIXES = dict.fromkeys([".txt", "", ".md", ".txt.xz", ".xz", ".txt.gz"], (TEXT, 256))
SUFFIXES |= dict.fromkeys([".bin", ".u16", ".bin.xz", ".u16.xz", ".bin.gz", ".llama.u16"], (GPT2, 50304))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_every_suffix_hold_the_same_tokens(tmp_path, suffix):
    content, vocab_size = SUFFIXES[suffix]
    data = load(write(tmp_path, f"a{suffix}", content), context=9)
    tokens = np.concatenate([data.train.tokens, data.held_out])
    assert tokens.tobytes() == content
    assert len(data.held_out) == round(len(tokens) / 20)
    assert data.shape.vocab_size == vocab_size


def test_a_validation_file_is_held_out_whole(tmp_path):
    held_out = write(tmp_path, "b.txt.xz", b"b" * 40)
    for spec in (write(tmp_path, "a.txt", TEXT), "stdlib"):
        data = load(spec, context=9, validation=held_out)
        assert bytes(data.held_out) == b"b" * 40
        assert len(data.train.tokens) >= len(TEXT)


@pytest.mark.parametrize(("largest", "given", "expected"), [(0, None, 64), (63, None, 64), (64, None, 128), (5, 6, 6)])
def test_the_vocabulary_holds_the_tokens_of_both_parts(largest, given, expected):
    small, large = np.zeros(20, np.uint16), np.full(20, largest, np.uint16)
    for parts in ((small, large), (large, small)):
        assert token_data(*parts, 3, given).shape.vocab_size == expected


LARGE = np.arange(0, 140_000, 97)


@pytest.mark.parametrize("name", ["a.u32", "a.npy", "a.u32.gz"])
def test_vocabularies_of_more_than_two_bytes_are_read(name, tmp_path):
    content = npy(LARGE) if name == "a.npy" else LARGE.astype("<u4").tobytes()
    data = load(write(tmp_path, name, content), context=9)
    assert np.array_equal(np.concatenate([data.train.tokens, data.held_out]), LARGE)
    assert data.shape.vocab_size == -(-(LARGE[-1] + 1) // 64) * 64
    inputs, _ = data.train.batch(0, 4, 0)
    assert inputs.dtype == torch.int64 and inputs.max() > 65_535


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_the_type_of_a_raw_file_may_be_said(kind, tmp_path):
    tokens = np.tile(np.array([5, 0], kind), 40)  # as uint16 it looks like uint32
    path = write(tmp_path, "a.bin", tokens.astype(np.dtype(kind).newbyteorder("<")).tobytes())
    assert np.array_equal(read_tokens(path, kind), tokens)


@pytest.mark.parametrize("tokens", [[0] * 40, [1, 2] * 20, [7, 3] * 20, list(range(40)), [9000, 20] * 20, [5, 0] * 7])
def test_uint16_tokens_are_not_taken_for_uint32(tokens, tmp_path):
    path = write(tmp_path, "a.u16", np.array(tokens, "<u2").tobytes())
    assert np.array_equal(read_tokens(path), tokens)


def refusal(folder, spec, **options):
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError) as refused:
        load(spec, **{"context": 9} | options)
    assert "\n" not in str(refused.value)
    assert sorted(folder.iterdir()) == before
    return str(refused.value)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array):
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


LONG = b"ab" * 500
BROKEN_TOKENS = [
    ("none.txt", None, {}, "none.txt is not a file"),
    ("a.txt", b"", {}, "empty"),
    ("a.bin.xz", lzma.compress(b""), {}, "empty"),
    ("a.bin", b"abc" * 101, {}, "odd number of bytes, 303"),
    ("a.xz", lzma.compress(LONG)[:-9], {}, "not a complete .xz file"),
    ("a.gz", gzip.compress(LONG, mtime=0)[:-9], {}, "not a complete .gz file"),
    ("a.xz", LONG, {}, "not a complete .xz file"),
    ("a.gz", LONG, {}, "not a complete .gz file"),
    ("a.gz", gzip.compress(LONG, mtime=0)[:10] + LONG, {}, "not a complete .gz file"),
    ("a.txt", LONG[:9], {}, "train part holds 9 tokens, but one window of context 9 needs 10"),
    ("a.txt", LONG[:100], {}, "validation part holds 5 tokens"),
    ("a.txt", LONG, {"validation": "none.txt"}, "none.txt is not a file"),
    ("a.txt", LONG, {"vocab_size": 98}, "has token 98; give at least 99"),
    ("a.txt", LONG, {"context": 0}, "context must be at least 1, got 0"),
    ("a.txt", LONG, {"augment": True}, "holds tokens"),
    ("a.txt", LONG, {"validation": "good.bin"}, "uint8 and uint16"),
    ("a.u32", b"abc" * 102, {}, "not a multiple of 4, 306"),
    ("a.npy", LONG, {}, "not an array that numpy.save wrote"),
    ("a.npy", npz(np.arange(500)), {}, "an archive of arrays (.npz), not one array"),
    ("a.npy", npy(np.ones((2, 500), int)), {}, "one row of integers, but holds int64 [2, 500]"),
    ("a.npy", npy(np.ones(500)), {}, "but holds float64"),
    ("a.npy", npy(np.full(500, -1)), {}, "holds token -1"),
    ("a.bin", np.arange(1, 500, dtype="<u4").tobytes(), {}, "looks like uint32 tokens"),
    ("a.u16", np.arange(60_000, 140_000, 90, dtype="<u4").tobytes(), {}, "pass --token-type uint32"),
    ("a.bin.xz", lzma.compress(np.full(500, 3, "<u4").tobytes()), {}, "looks like uint32 tokens"),
]


@pytest.mark.parametrize(("name", "content", "options", "words"), BROKEN_TOKENS)
def test_broken_token_files_are_refused_in_one_line(tmp_path, monkeypatch, name, content, options, words):
    monkeypatch.chdir(tmp_path)
    Path("good.bin").write_bytes(LONG)
    if content is not None:
        Path(name).write_bytes(content)
    assert words in refusal(tmp_path, name, **options)


def test_no_source_of_the_standard_library_is_in_both_parts():
    data, (train, held_out) = load("stdlib", context=64), split(sources(Path(os.__file__).parent))
    assert not set(train) & set(held_out)
    assert np.array_equal(data.train.tokens, joined(train))
    assert 0.04 < len(data.held_out) / (len(data.train.tokens) + len(data.held_out)) < 0.10
    assert 2**20 < len(data.train.tokens) < LIMIT


def test_sources_stand_in_an_order_of_their_own(tmp_path):
    names = ["os.py", "json/decoder.py", "abc.py", "json/encoder.py", "site-packages/abc.py", "json/tests/a.py", "x.py"]
    roots = tmp_path / "one", tmp_path / "two"
    for path in (root / name for root in roots for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    one, two = ([path.relative_to(root).as_posix() for path in sources(root)] for root in roots)
    assert one == two != sorted(two)
    assert set(one) == set(names[:4])


def write_mnist(folder, suffix=""):
    parts = some_images(30), some_images(7)
    for name, part in zip(("train", "t10k"), parts, strict=True):
        for kind, array in (("images-idx3", part.pixels[:, 0]), ("labels-idx1", part.labels)):
            header = np.array([0x0800 + array.ndim, *array.shape], ">u4").tobytes()
            write(folder, f"{name}-{kind}-ubyte{suffix}", header + array.astype(np.uint8).tobytes())
    return parts


def write_cifar10(folder, suffix=".bin"):
    parts = {"train": some_images(5, 3, 32), "test": some_images(1, 3, 32)}
    for part, images in parts.items():
        write(folder, f"{part}_lables.json", json.dumps(images.labels.tolist()).encode())
        for number, (image, label) in enumerate(zip(images.pixels, images.labels, strict=True), 1):
            path = folder / (f"data_batch_{number}{suffix}" if part == "train" else f"test_batch{suffix}")
            if suffix == ".bin":
                path.write_bytes(bytes([label]) + image.tobytes())
            else:
                row = image.transpose(1, 2, 0).reshape(1, 1024, 3)
                pytest.importorskip("PIL.Image", reason="needs Pillow").fromarray(row).save(path)
    return parts.values()


@pytest.mark.parametrize("suffix", ["", ".gz", ".bin", ".png"])
def test_folders_give_the_images_that_were_written(tmp_path, suffix):
    train, test = (write_cifar10 if suffix in (".bin", ".png") else write_mnist)(tmp_path, suffix)
    data = load(tmp_path, context=1)
    inputs, labels = joint(data.validation(3))
    pixels = inputs * data.train.normalise.std + data.train.normalise.mean
    assert np.array_equal(pixels.round().byte().numpy(), test.pixels)
    assert labels.tolist() == test.labels.tolist()
    std, mean = torch.std_mean(data.train.batch(0, len(train.labels), seed=0)[0], (0, 2, 3), correction=0)
    assert max((std - 1).abs().max(), mean.abs().max()) < 1e-5


BROKEN_IMAGES = [
    (write_mnist, "train-images-idx3-ubyte", lambda raw: raw[:-1], "should hold 1936 bytes"),
    (write_mnist, "t10k-labels-idx1-ubyte", lambda raw: raw + b"\0", "should hold 15 bytes"),
    (write_mnist, "t10k-images-idx3-ubyte", lambda raw: b"\1" + raw[1:], "opens with 0x1000803"),
    (write_mnist, "t10k-labels-idx1-ubyte", lambda raw: raw[:7] + b"\6" + raw[8:-1], "7 images and 6 labels"),
    (write_mnist, "t10k-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\12", "label 10"),
    (write_cifar10, "data_batch_3.bin", lambda raw: raw[:-1], "3073 bytes, but has 3072"),
    (write_cifar10, "test_batch.bin", lambda raw: b"\12" + raw[1:], "got 1, of which 0 are valid"),
]


@pytest.mark.parametrize(("writer", "name", "change", "words"), BROKEN_IMAGES)
def test_broken_folders_are_refused_in_one_line(tmp_path, writer, name, change, words):
    assert "neither MNIST" in refusal(tmp_path, tmp_path)
    writer(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    assert words in refusal(tmp_path, tmp_path)
    (tmp_path / name).unlink()
    assert name in refusal(tmp_path, tmp_path)
    assert "leave them out" in refusal(tmp_path, tmp_path, vocab_size=10)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_file_that_unpacks_to_more_than_the_limit_is_refused_in_bounded_memory(tmp_path, monkeypatch, suffix):
    assert token_files.MAX_READ == 2**30
    monkeypatch.setattr(token_files, "MAX_READ", 2**18)
    path = tmp_path / f"tokens.txt{suffix}"
    with token_files.OPENERS[suffix](path, "wb") as file:
        file.write(bytes(2**24))
    tracemalloc.start()
    try:
        said = refusal(tmp_path, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "holds more than 0.25 MiB, the most that may be read into memory; unpack it" in said
    assert peak < 12 * 2**20  # xz has a dictionary of 8 MiB
    with token_files.OPENERS[suffix](path, "wb") as file:
        file.write(bytes(range(128)) * 2**11)
    assert len(load(path, context=8).held_out) == round(0.05 * 2**18)


HOSTILE_PACKAGES = {
    "deep": ("train_lables.json", b"[" * 100_000, "list of labels"),
    "huge": ("test_lables.json", b"[1e400, 1]", "list of labels"),
    "too large": ("test_lables.json", b"[99999999999999999999999999]", "list of labels"),
    "ragged": ("test_lables.json", b"[[1], 2]", "list of labels"),
    "no PNG": ("test_batch.png", b"PNG", "is not a complete PNG"),
}


@pytest.mark.parametrize("name", HOSTILE_PACKAGES)
def test_a_hostile_package_is_refused_in_one_line(tmp_path, name):
    file, content, words = HOSTILE_PACKAGES[name]
    write_cifar10(tmp_path, ".png")
    (tmp_path / file).write_bytes(content)
    assert words in refusal(tmp_path, tmp_path)


def test_a_png_of_another_shape_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    write_cifar10(tmp_path, ".png")
    image.new("1", (3_000, 500)).save(tmp_path / "test_batch.png")
    monkeypatch.setattr(image.Image, "convert", lambda *_: pytest.fail("unpacked"))
    monkeypatch.setattr(datasets, "TRAIN", datasets.TEST)
    assert "pixels wide" in refusal(tmp_path, tmp_path)
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 10**5)
    assert "is not a complete PNG" in refusal(tmp_path, tmp_path)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "data_batch_1.png").touch()
    for module, spec in (("sklearn.datasets", "digits"), ("PIL", tmp_path)):
        monkeypatch.setitem(sys.modules, module, None)
        assert "prunus[vision]" in refusal(tmp_path, spec)


def test_crops_are_windows_of_the_padded_image_and_half_are_mirrored():
    image = np.arange(1, 65, dtype=np.uint8).reshape(8, 8)
    padded = np.pad(image, 4)
    windows = [padded[y : y + 8, x : x + 8] for y in range(9) for x in range(9)]
    mirrored = {window[:, ::-1].tobytes() for window in windows}
    moved = [crop.tobytes() for crop in crop_and_flip(np.tile(image, (4000, 1, 1, 1)), 0, seed=0)]
    assert set(moved) == mirrored | {window.tobytes() for window in windows}
    assert 0.45 < sum(crop in mirrored for crop in moved) / 4000 < 0.55


@pytest.mark.parametrize(("spec", "counts"), [("digits", (1437, 360)), (MNIST, (60000, 10000))])
def test_real_sets_are_whole(spec, counts):
    if spec == "digits":
        pytest.importorskip("sklearn", reason="needs scikit-learn")
    elif not MNIST.is_dir():
        pytest.skip("PRUNUS_DATA names no folder with vision/mnist")
    data = load(spec, context=1)
    assert (len(data.train), len(data.held_out.labels)) == counts
