"""Opening datasets, and the errors for those that do not exist or cannot be used."""

import http.server
import socket
import threading

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_digits

tfds = pytest.importorskip("tensorflow_datasets")

from keras_vit.train.data import sources  # noqa: E402
from keras_vit.train.data.splits import IndexedSplit, StreamedSplit  # noqa: E402
from keras_vit.train.recipe import Data  # noqa: E402

pytestmark = pytest.mark.backend_free

SHAPES = {"fixed": (5, 7, 3), "varied": (None, None, 3)}


def example(shape, i, name, rng):
    shape = (shape[0] or 4 + i, shape[1] or 9 - i % 5, 3)
    return {"image": rng.integers(0, 256, shape, dtype=np.uint8), "label": i % 3, "file": name}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Two small datasets, prepared on disk: images of one size, and of many sizes."""
    folder = tmp_path_factory.mktemp("tfds")
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=shape, encoding_format="png"),
                "label": tfds.features.ClassLabel(names=["ant", "bee", "cat"]),
                "file": tfds.features.Text(),
            }
        )
        splits = {
            split: [(i, example(shape, i, f"{split}{i}", rng)) for i in range(count)]
            for split, count in (("train", 11), ("validation", 4))
        }
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            version="1.0.0",
            features=features,
            split_datasets=splits,
            data_dir=folder,
            download_config=tfds.download.DownloadConfig(num_shards=2),
        )
    return str(folder)


def take(dataset, count):
    return [(int(e["number"]), int(e["label"]), e["image"].numpy()) for e in dataset.take(count)]


def same(a, b):
    return len(a) == len(b) and all(
        x[:2] == y[:2] and np.array_equal(x[2], y[2]) for x, y in zip(a, b, strict=True)
    )


# -- digits


def digits_as_bytes():
    digits = load_digits()
    return (digits.images * (255 / 16)).round().astype("uint8"), digits.target


def test_digits_agree_with_scikit_learn():
    source = sources.open_source(Data("digits"))
    known = {picture.tobytes(): label for picture, label in zip(*digits_as_bytes(), strict=True)}
    labels = [known[np.asarray(p)[..., 0].tobytes()] for p in source.test.images]
    assert np.array_equal(labels, source.test.labels)
    seen = [np.asarray(p).tobytes() for s in (source.train, source.test) for p in s.images]
    assert len(seen) == 1797 and len(set(seen)) == len(known)
    assert source.labels == tuple("0123456789") and source.num_classes == 10
    assert source.shape == (8, 8, 1)
    assert (source.train.num_examples, source.test.num_examples) == (1437, 360)
    counts = np.bincount(source.test.labels)
    assert counts.min() >= 34 and counts.max() <= 37  # stratified


def test_digits_unknown_split_lists_the_splits():
    with pytest.raises(ValueError, match="data.test must be 'train' or 'test'.*'validation'"):
        sources.open_source(Data("digits", test="validation"))


@pytest.mark.parametrize("source", ["digit", "tfds:", "tfds", "folder:x"])
def test_unknown_source_lists_the_kinds_of_source(source):
    with pytest.raises(ValueError, match="'digits', 'tfds:NAME' or 'folder'"):
        sources.open_source(Data(source))


# -- TensorFlow Datasets


@pytest.mark.parametrize("name", SHAPES)
def test_tfds_small_set_is_in_memory(data_dir, name):
    source = sources.open_source(Data(f"tfds:{name}", data_dir, "train[:9]", "validation"))
    assert source.labels == ("ant", "bee", "cat") and source.num_classes == 3
    assert source.shape == SHAPES[name]
    assert isinstance(source.train, IndexedSplit)
    assert (source.train.num_examples, source.test.num_examples) == (9, 4)
    assert tfds.builder(name, data_dir=data_dir).info.splits["train"].num_shards == 2
    assert source.train.images.dtype == (tf.uint8 if name == "fixed" else tf.string)


@pytest.mark.parametrize("name", SHAPES)
def test_tfds_stream_has_the_same_images_as_memory(data_dir, name, monkeypatch):
    data = Data(f"tfds:{name}", data_dir, "train", "validation")
    memory = sources.open_source(data)
    monkeypatch.setattr(sources, "MEMORY_LIMIT", 1)
    stream = sources.open_source(data)
    assert isinstance(stream.train, StreamedSplit) and stream.train.num_examples == 11
    assert same(take(memory.train.ordered(), 20), take(stream.train.ordered(), 20))
    assert not same(take(memory.test.ordered(), 20), take(stream.train.ordered(), 20))


def test_tfds_stream_order_is_a_function_of_seed_and_epoch(data_dir, monkeypatch):
    monkeypatch.setattr(sources, "MEMORY_LIMIT", 1)
    split = sources.open_source(Data("tfds:fixed", data_dir, "train", "validation")).train
    tf.random.set_seed(1)
    run = take(split.shuffled(seed=3), 33)
    tf.random.set_seed(2)
    assert same(run, take(split.shuffled(seed=3), 33))  # for any seed of TensorFlow
    assert not same(run, take(split.shuffled(seed=4), 33))
    epochs = [[image.tobytes() for _, _, image in run[i : i + 11]] for i in (0, 11, 22)]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) and len(set(epochs[0])) == 11
    assert epochs[0] != epochs[1] != epochs[2]
    for start in (0, 5, 11, 26):
        assert same(run[start:], take(split.shuffled(seed=3, start=start), 33 - start))


def test_tfds_stream_repeats(data_dir, monkeypatch):
    monkeypatch.setattr(sources, "MEMORY_LIMIT", 1)
    split = sources.open_source(Data("tfds:fixed", data_dir, "train", "validation")).train
    once = take(split.shuffled(seed=3), 22)
    thrice = take(split.shuffled(seed=3, repeats=3), 66)
    assert [n for n, _, _ in thrice] == list(range(66))
    assert all(np.array_equal(e[2], once[i // 3][2]) for i, e in enumerate(thrice))
    for start in (4, 35):
        again = take(split.shuffled(seed=3, start=start, repeats=3), 66 - start)
        assert same(thrice[start:], again)


def test_tfds_mock_data(monkeypatch):
    monkeypatch.setattr(sources, "prepare", lambda builder: None)
    with tfds.testing.mock_data(num_examples=6):
        source = sources.open_source(Data("tfds:imagenet2012", None, "train[:99%]", "validation"))
    assert source.num_classes == 1000 and source.labels[0] == "n01440764"
    assert source.shape == (None, None, 3)
    assert isinstance(source.train, StreamedSplit) and source.train.num_examples == 6


def test_tfds_unknown_set_lists_the_closest_names():
    with pytest.raises(ValueError, match="near: .*cifar10.*'tfds:cifar11'"):
        sources.open_source(Data("tfds:cifar11"))


def test_tfds_unknown_set_lists_close_names_of_prepared_sets(data_dir):
    with pytest.raises(ValueError, match="near: .*varied"):
        sources.open_source(Data("tfds:varied2", data_dir))


def test_tfds_unknown_configuration_lists_the_existing_ones(tmp_path):
    with pytest.raises(ValueError, match=r"it has: .*160px.*'tfds:imagenette/161px'"):
        sources.open_source(Data("tfds:imagenette/161px", str(tmp_path)))


@pytest.mark.parametrize("split", ["test", "tests[:5%]", "train[:5%", "validation[:0]"])
def test_tfds_unknown_split_lists_the_existing_ones(data_dir, split):
    with pytest.raises(ValueError, match="data.test must have images of the splits train, val"):
        sources.open_source(Data("tfds:fixed", data_dir, test=split))


@pytest.mark.parametrize("limit", [1, sources.MEMORY_LIMIT])
def test_tfds_split_without_labels_is_refused(data_dir, monkeypatch, limit):
    monkeypatch.setattr(sources, "MEMORY_LIMIT", limit)
    builder = type(tfds.builder("fixed", data_dir=data_dir))
    read = builder.as_dataset

    def unlabeled(self, **arguments):
        dataset = read(self, **arguments)
        if arguments["split"] == "train":
            return dataset
        return dataset.map(lambda e: {**e, "label": tf.constant(-1, tf.int64)})

    monkeypatch.setattr(builder, "as_dataset", unlabeled)
    with pytest.raises(ValueError, match="data.test must be a split with labels.*'validation'"):
        sources.open_source(Data("tfds:fixed", data_dir, "train", "validation"))


def test_tfds_set_without_images_lists_its_features(tmp_path):
    with pytest.raises(ValueError, match="a dataset of images.*'sentence': Text"):
        sources.open_source(Data("tfds:glue/cola", str(tmp_path)))


def test_tfds_set_that_cannot_be_downloaded_says_how_to_prepare_it(data_dir, monkeypatch):
    monkeypatch.setattr(sources, "_unreachable", lambda url: "ConnectionError")
    fetches = tfds.core.DatasetBuilder
    monkeypatch.setattr(fetches, "download_and_prepare", lambda self: pytest.fail("it fetches"))
    with pytest.raises(ValueError, match=r"tfds build cifar100 --data_dir") as error:
        sources.open_source(Data("tfds:cifar100", data_dir))
    for part in ("www.cs.toronto.edu does not answer", f"{data_dir}/cifar100", "fixed, varied"):
        assert part in str(error.value)


def test_tfds_set_with_configuration_that_cannot_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_unreachable", lambda url: "ConnectionError")
    command = rf"tfds build imagenette/160px --data_dir {tmp_path}$"
    with pytest.raises(ValueError, match=command):
        sources.open_source(Data("tfds:imagenette/160px", str(tmp_path)))


def test_tfds_set_that_is_downloaded_by_hand(tmp_path):
    with pytest.raises(ValueError, match="by hand to .*/downloads/manual.*ILSVRC2012_img_train"):
        sources.open_source(Data("tfds:imagenet2012", str(tmp_path)))


def test_tfds_set_is_downloaded_if_its_host_answers(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(sources, "_unreachable", lambda url: None)
    builder = tfds.builder("cifar100", data_dir=tmp_path)
    monkeypatch.setattr(type(builder), "download_and_prepare", lambda self: fetched.append(self))
    sources.prepare(builder)
    assert fetched == [builder]


def test_probe_of_a_host(monkeypatch):
    monkeypatch.setattr(sources, "PROBE_SECONDS", 60)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert sources._unreachable(f"http://127.0.0.1:{server.server_port}/x") is None
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        monkeypatch.setattr(sources, "PROBE_SECONDS", 0.2)
        assert sources._unreachable(url) in ("ReadTimeout", "no answer in 0.2 s")
    monkeypatch.setattr(sources, "PROBE_SECONDS", 60)
    assert sources._unreachable(url) == "ConnectionError"


@pytest.mark.slow
@pytest.mark.parametrize("name, shape", [("cifar10", (32, 32, 3)), ("fashion_mnist", (28, 28, 1))])
def test_tfds_real_set(name, shape):
    if not tfds.builder(name).is_prepared():
        pytest.skip(f"{name} is not prepared")
    source = sources.open_source(Data(f"tfds:{name}", train="train[:98%]", test="train[98%:]"))
    assert source.shape == shape and len(set(source.labels)) == 10
    assert np.bincount(source.test.labels).min() > 50
    pictures = [{p.tobytes() for p in s.images.numpy()} for s in (source.train, source.test)]
    assert len(pictures[0] & pictures[1]) < 20  # Fashion-MNIST has a few duplicates


# -- folders


def write(path, value=0, size=(6, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 2 * value % 256, 7)).save(path)


@pytest.fixture
def folder(tmp_path):
    value = 0
    for part, count in (("train", 3), ("test", 2)):
        for label in ("rose", "daisy"):
            for suffix in ("jpg", "PNG", "jpeg", "bmp", "gif")[:count]:
                value += 9
                write(tmp_path / part / label / f"{value}.{suffix}", value, (6 + value % 4, 5))
    return tmp_path


def test_folder_classes_are_its_sorted_subfolders(folder):
    write(folder / "train" / "rose" / "more" / "x.gif", 200)
    (folder / "train" / "rose" / "notes.txt").write_text("no image")
    (folder / "train" / "rose" / "._9.jpg").write_text("what macOS leaves")
    source = sources.open_source(Data("folder", str(folder)))
    assert source.labels == ("daisy", "rose") and source.num_classes == 2
    assert source.shape == (None, None, 3)
    assert (source.train.num_examples, source.test.num_examples) == (7, 4)
    assert source.train.labels.numpy().tolist() == [0, 0, 0, 1, 1, 1, 1]
    first = next(iter(source.train.ordered()))["image"].numpy()
    assert first == (folder / "train" / "daisy" / "36.jpg").read_bytes()


def test_folder_of_classes_is_split_in_percent(tmp_path):
    for label, count in (("a", 20), ("b", 10)):
        for i in range(count):
            write(tmp_path / label / f"{i:02}.png", i)
    source = sources.open_source(Data("folder", str(tmp_path), ".[:90%]", ".[90%:]"))
    paths = [set(s.images.numpy().tolist()) for s in (source.train, source.test)]
    assert [len(p) for p in paths] == [27, 3] and not paths[0] & paths[1]
    assert np.bincount(source.test.labels).tolist() == [2, 1]
    last = sorted(paths[0] | paths[1])[-3:]
    assert paths[1] != set(last)  # not the last by name
    again = sources.open_source(Data("folder", str(tmp_path), ".[:90%]", ".[90%:]"))
    assert np.array_equal(source.train.images, again.train.images)


def test_folder_test_may_lack_a_class(folder):
    for path in (folder / "test" / "rose").iterdir():
        path.unlink()
    (folder / "test" / "rose").rmdir()
    source = sources.open_source(Data("folder", str(folder)))
    assert source.labels == ("daisy", "rose") and set(source.test.labels.numpy()) == {0}


def test_folder_with_a_class_in_test_alone_is_refused(folder):
    write(folder / "test" / "tulip" / "1.png")
    with pytest.raises(ValueError, match=r"classes of data.train only \(daisy, rose\).*tulip"):
        sources.open_source(Data("folder", str(folder)))


def test_folder_without_a_part_lists_the_existing_ones(folder):
    (folder / "test").rename(folder / "val")
    with pytest.raises(ValueError, match="data.test='test'; .* has: train, val"):
        sources.open_source(Data("folder", str(folder)))
    assert sources.open_source(Data("folder", str(folder), test="val")).test.num_examples == 4


def test_folder_path(folder):
    with pytest.raises(ValueError, match=r"data.path \(--data\) must name a folder"):
        sources.open_source(Data("folder"))
    with pytest.raises(ValueError, match=f"near: {folder.name}"):
        sources.open_source(Data("folder", str(folder) + "x"))


@pytest.mark.parametrize("split", ["train[:9]", "train[90%]", "train[:101%]", "[train"])
def test_folder_malformed_split(folder, split):
    with pytest.raises(ValueError, match=r"a slice of one as in 'train\[:90%\]'"):
        sources.open_source(Data("folder", str(folder), split))


def test_folder_empty_class(folder):
    (folder / "train" / "tulip").mkdir()
    (folder / "train" / "tulip" / "1.webp").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match="images .* of every class. Received: none in tulip"):
        sources.open_source(Data("folder", str(folder)))


def test_folder_without_test_images_is_refused(folder):
    with pytest.raises(ValueError, match="data.test must have an image"):
        sources.open_source(Data("folder", str(folder), test="test[:0%]"))


@pytest.mark.parametrize("content", [b"", b"<html>404</html>"])
def test_folder_file_that_is_not_an_image_is_named(folder, content):
    (folder / "train" / "rose" / "bad.jpg").write_bytes(content)
    with pytest.raises(ValueError, match=r"rose/bad.jpg must be a JPEG.*b'"):
        sources.open_source(Data("folder", str(folder)))


def keep(content, share=1.0, behind=b""):
    return content[: round(share * len(content))] + behind


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_folder_truncated_file_is_named(folder, suffix, part):
    path = folder / part / "rose" / f"cut.{suffix}"
    write(path, 5, (40, 30))
    path.write_bytes(keep(path.read_bytes(), 0.8))
    with pytest.raises(ValueError, match=rf"{part}/rose/cut.{suffix} must be an image .*cut off"):
        sources.open_source(Data("folder", str(folder)))


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp"])
def test_folder_complete_file_may_have_trailing_bytes(folder, suffix):
    path = folder / "train" / "rose" / f"more.{suffix}"
    write(path, 5, (40, 30))
    if suffix != "bmp":
        path.write_bytes(keep(path.read_bytes(), behind=b"what a camera adds"))
    assert sources.open_source(Data("folder", str(folder))).train.num_examples == 7


# -- images without labels


def test_folder_without_classes_is_for_objectives_that_need_no_labels(tmp_path):
    for i in range(20):
        write(tmp_path / "train" / f"{i:02}.png", i)
    for i in range(3):
        write(tmp_path / "test" / f"{i}.png", i)
    data = Data("folder", str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.train must be a folder with one sub-folder a cl"):
        sources.open_source(data)
    source = sources.open_source(data, needs_labels=False)
    assert source.labels is None and source.num_classes == 0
    assert (source.train.num_examples, source.test.num_examples) == (20, 3)
    assert not source.train.labels.numpy().any()
    sliced = Data("folder", str(tmp_path / "train"), ".[:90%]", ".[90%:]")
    source = sources.open_source(sliced, needs_labels=False)
    parts = [set(s.images.numpy().tolist()) for s in (source.train, source.test)]
    assert [len(p) for p in parts] == [18, 2] and not parts[0] & parts[1]
    with pytest.raises(ValueError, match=r"data\.train must be a folder .*data\.train='tain'"):
        sources.open_source(Data("folder", str(tmp_path), "tain"), needs_labels=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.train must have images \(.jpg.*: none in .*empty"):
        sources.open_source(Data("folder", str(tmp_path), "empty"), needs_labels=False)


def test_folder_keeps_its_classes_unless_one_part_has_none(folder):
    data = Data("folder", str(folder))
    source = sources.open_source(data, needs_labels=False)
    assert source.labels == ("daisy", "rose") and source.num_classes == 2
    for path in list((folder / "test").rglob("*.*")):
        path.rename(folder / "test" / path.name)
    for path in list((folder / "test").iterdir()):
        if path.is_dir():
            path.rmdir()
    source = sources.open_source(data, needs_labels=False)
    assert source.labels is None and source.num_classes == 0
    assert (source.train.num_examples, source.test.num_examples) == (6, 4)


@pytest.fixture(scope="module")
def unlabeled(tmp_path_factory):
    """A set without labels, and one whose "rest" has none, as STL-10's."""
    folder = tmp_path_factory.mktemp("unlabeled")
    image = {"image": tfds.features.Image(shape=(5, 7, 3), encoding_format="png")}
    label = {"label": tfds.features.ClassLabel(names=["ant", "bee", "cat"])}
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
    for name, features in (("plain", image), ("mixed", image | label)):
        splits = {
            split: [
                (i, {"image": pixels[i], "label": -1 if i >= labels else i % 3})
                for i in range(count)
            ]
            for split, count, labels in (
                *(("train", 6, 6), ("test", 4, 4)),
                *(("rest", 5, 0), ("half", 4, 2)),
            )
        }
        for examples in splits.values():
            for _, one in examples:
                if name == "plain":
                    del one["label"]
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            version="1.0.0",
            features=tfds.features.FeaturesDict(features),
            split_datasets=splits,
            data_dir=folder,
        )
    return str(folder)


@pytest.mark.parametrize("limit", [sources.MEMORY_LIMIT, 1])  # in memory, and streamed
def test_tfds_set_without_labels(unlabeled, limit, monkeypatch):
    monkeypatch.setattr(sources, "MEMORY_LIMIT", limit)
    plain, mixed = Data("tfds:plain", unlabeled), Data("tfds:mixed", unlabeled, train="rest")
    with pytest.raises(ValueError, match="must be a dataset of images with one class each"):
        sources.open_source(plain)
    with pytest.raises(ValueError, match=r"data\.train must be a split with labels.*'rest'"):
        sources.open_source(mixed)
    both = Data("tfds:mixed", unlabeled, train="train+rest")
    with pytest.raises(ValueError, match=r"data\.train must be a split with labels.*'train\+rest'"):
        sources.open_source(both)
    for data, count in ((plain, 6), (mixed, 5), (both, 11)):
        source = sources.open_source(data, needs_labels=False)
        assert source.labels is None and source.num_classes == 0
        found = take(source.train.ordered(), 15)
        assert [label for _, label, _ in found] == [0] * count
        assert found[0][2].shape == (5, 7, 3)
    # A stream is not read to its end before it trains.
    error = tf.errors.InvalidArgumentError if limit == 1 else ValueError
    with pytest.raises(error, match=r"data\.train must be a split with labels.*half.*in part"):
        take(sources.open_source(Data("tfds:mixed", unlabeled, train="half")).train.ordered(), 4)
    source = sources.open_source(Data("tfds:mixed", unlabeled), needs_labels=False)
    assert source.labels == ("ant", "bee", "cat") and source.num_classes == 3
