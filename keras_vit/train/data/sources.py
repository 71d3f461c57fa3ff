"""Sources of images, and how to open them.

A missing dataset is an error within seconds, which says where it was looked for and how to get it.
"""

import dataclasses
import difflib
import hashlib
import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import keras
import numpy as np
import tensorflow as tf

from keras_vit.train import recipe
from keras_vit.train.data.splits import IndexedSplit, Split, StreamedSplit

MEMORY_LIMIT = 2**30
"""Bytes of the largest TFDS set that is kept in memory; others are read in every epoch."""
PROBE_SECONDS = 3.0
UNLABELED = ""
"""The class of images that have none: no folder has this name."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
ENDS = {
    b"\xff\xd8\xff": b"\xff\xd9",
    b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82",
    b"BM": None,
    b"GIF8": None,
}
"""First bytes of an image file -> the last bytes of a whole one, or None if any."""
SLICE = re.compile(
    r"(?P<folder>[^\[\]]*)(\[((?P<first>\d{1,2}|100)%)?:((?P<last>\d{1,2}|100)%)?\])?"
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset of images with classes."""

    name: str
    """As in the recipe."""
    labels: tuple[str, ...] | None
    """Names of the classes; None if the dataset has none."""
    num_classes: int
    """0 for images without labels; each one then has label 0."""
    shape: tuple[int | None, int | None, int]
    """Height, width and channels; None if it varies between images."""
    train: Split
    test: Split


def open_source(data: recipe.Data, *, needs_labels: bool = True) -> Source:
    """Opens the dataset of a recipe.

    - `"digits"`: scikit-learn's 1,797 handwritten digits; splits "train" and "test".
    - `"tfds:NAME"`, `"tfds:NAME/CONFIG"`: any image classification set of TensorFlow Datasets,
      with its own split strings ("train[:98%]", "train+validation"). `path` is its data_dir. One of
      up to 1 GB is kept in memory, where any order and any start cost nothing. A larger one is
      read from its records; a resumed run reads, but does not decode, what it skips of the epoch.
    - `"folder"`: `path/train/CLASS/*.jpg` and `path/test/CLASS/*.jpg`, of JPEG, PNG, BMP and GIF
      (its first image), also in sub-folders of a class. A folder may be sliced in percent: where
      `path` holds the classes, `train=".[:90%]"` and `test=".[90%:]"` split each class by a
      hash of the file names, always in the same way. Without labels, `path/train/*.jpg`.

    Args:
        data: The recipe's `Data`.
        needs_labels: Whether images without labels are an error. If False, a folder may hold images
            instead of classes, and a TFDS set needs no labels. If one of the two splits has none,
            the source has none.

    Returns:
        The source. Images that are not kept in memory are not read yet.
    """
    leave_accelerators()  # before TensorFlow makes its first tensor
    kind, _, name = data.source.partition(":")
    if data.source == "digits":
        return _open_digits(data)
    if data.source == "folder":
        return _open_folder(data, needs_labels)
    if kind == "tfds" and name:
        return _open_tfds(data, name, needs_labels)
    raise ValueError(
        "data.source must be 'digits', 'tfds:NAME' or 'folder'. "
        f"Received: data.source={data.source!r}"
    )


def leave_accelerators() -> None:
    """Keeps TensorFlow, which only makes batches here, from taking the GPUs of JAX or torch."""
    if keras.backend.backend() == "tensorflow" or not tf.config.get_visible_devices("GPU"):
        return
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:  # TensorFlow has started: too late, and the run is still right
        logger.warning("TensorFlow takes memory of the GPUs that Keras trains on: %s", error)


# -- digits


def _open_digits(data: recipe.Data) -> Source:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pictures = (digits.images * (255 / 16)).round().astype("uint8")[..., None]
    parts = train_test_split(
        pictures, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    splits = {"train": IndexedSplit(*parts[0::2]), "test": IndexedSplit(*parts[1::2])}
    for field in ("train", "test"):
        if (split := getattr(data, field)) not in splits:
            raise ValueError(
                f"data.{field} must be 'train' or 'test' for digits. "
                f"Received: data.{field}={split!r}"
            )
    labels = tuple("0123456789")
    return Source("digits", labels, 10, (8, 8, 1), splits[data.train], splits[data.test])


# -- TensorFlow Datasets


def _open_tfds(data: recipe.Data, name: str, needs_labels: bool) -> Source:
    builder = _builder(name, data.path)
    image, label = _features(builder, name, needs_labels)
    if not builder.is_prepared():
        prepare(builder)
    shape = builder.info.features[image].shape
    found = [
        _tfds_split(builder, field, getattr(data, field), image, label, needs_labels)
        for field in ("train", "test")
    ]
    train, test = (split for split, _ in found)
    if label is None or not all(labeled for _, labeled in found):
        return Source(data.source, None, 0, shape, train, test)
    classes = builder.info.features[label]
    names = tuple(classes.names) if classes.names else None
    return Source(data.source, names, classes.num_classes, shape, train, test)


def _builder(name: str, path: str | None):
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=path)
    except tfds.core.registered.DatasetNotFoundError as error:
        folder = Path(path or tfds.core.constants.DATA_DIR).expanduser()
        known = {*tfds.list_builders(with_community_datasets=False), *_entries(folder)}
        near = difflib.get_close_matches(name.split("/")[0], sorted(known), n=5)
        hint = f"near: {', '.join(near)}" if near else "see tensorflow.org/datasets/catalog"
        raise ValueError(
            f"data.source must name a dataset of TensorFlow Datasets; {hint}. "
            f"Received: data.source='tfds:{name}'"
        ) from error
    except ValueError as error:
        configs = tfds.builder_cls(name.split("/")[0].split(":")[0]).builder_configs
        there = f"it has: {', '.join(configs)}" if configs else "this one has none"
        raise ValueError(
            f"data.source must name a configuration or version of the dataset ({there}). "
            f"Received: data.source='tfds:{name}'"
        ) from error


def _features(builder, name: str, needs_labels: bool) -> tuple[str, str | None]:
    """Names of the image and of the class in an example; without a class, None."""
    import tensorflow_datasets as tfds

    features = builder.info.features
    image, label = builder.info.supervised_keys or ("image", "label")

    def has(key, kind):
        try:
            return isinstance(features[key], kind)
        except (KeyError, TypeError):  # no such feature, or features that are not a dict
            return False

    if not has(label, tfds.features.ClassLabel) and not needs_labels:
        image, label = "image" if image == label else image, None
    right = has(image, tfds.features.Image) and (label or not needs_labels)
    right = right and (label is None or has(label, tfds.features.ClassLabel))
    if not (right and features[image].np_dtype == np.uint8):
        raise ValueError(
            f"data.source must be a dataset of images with one class each. 'tfds:{name}' has: "
            + " ".join(str(features).split())
        )
    return image, label


def prepare(builder) -> None:
    """Downloads and prepares a dataset, or raises at once if that cannot work."""
    import tensorflow_datasets as tfds

    root, name = _place(builder)
    if reason := _obstacle(builder):
        folder = root / name if (root / name).is_dir() else root
        raise ValueError(
            "data.source must be a dataset that is prepared or can be downloaded. "
            f"'tfds:{name}' is not prepared in {builder.data_path} "
            f"({folder} has: {_listing(folder)}), and {reason}. "
            f"To prepare it: tfds build {name} --data_dir {root}"
        )
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    builder.download_and_prepare()


def _obstacle(builder) -> str | None:
    """Why a dataset cannot be downloaded now, or None."""
    if instructions := builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        manual = _place(builder)[0] / "downloads" / "manual"
        if not _entries(manual):
            text = " ".join(instructions.split()).rstrip(".")
            return f"it must be downloaded by hand to {manual}, which is empty: {text}"
        return None
    hosts = {urlsplit(url).netloc: url for url in builder.url_infos or () if url[:4] == "http"}
    for host, url in hosts.items():
        if problem := _unreachable(url):
            return f"{host} does not answer ({problem})"
    return None


def _place(builder) -> tuple[Path, str]:
    """TFDS' data_dir, and the name of the dataset in it: "cifar10", "imagenette/160px"."""
    path = Path(builder.data_path).parent  # without the version
    root = path.parents[1] if builder.builder_config else path.parent
    return root, path.relative_to(root).as_posix()


def _unreachable(url: str) -> str | None:
    """Why a host cannot be reached; None if it answers at all."""
    import requests  # as TFDS does, with its proxies

    problem = [f"no answer in {PROBE_SECONDS:g} s"]

    def ask():
        try:
            requests.head(url, timeout=PROBE_SECONDS)
            problem[0] = None
        except requests.RequestException as error:
            problem[0] = type(error).__name__

    # A thread, because requests' timeout does not cover the DNS lookup.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return problem[0]


def _tfds_split(
    builder, field: str, split: str, image: str, label: str | None, needs_labels: bool
) -> tuple[Split, bool]:
    """A split, and whether it has labels."""
    import tensorflow_datasets as tfds

    features, splits = builder.info.features, builder.info.splits
    shape = features[image].shape
    encoded = None in shape

    def open(seed):
        dataset = builder.as_dataset(
            split=split,
            shuffle_files=seed is not None,
            decoders=tfds.decode.PartialDecoding(
                {image: True} | ({label: True} if label else {}),
                decoders={image: tfds.decode.SkipDecoding()} if encoded else None,
            ),
            read_config=tfds.ReadConfig(
                shuffle_seed=seed,
                shuffle_reshuffle_each_iteration=False,
                try_autocache=False,
                enable_ordering_guard=False,
            ),
        )
        return dataset.map(
            lambda example: {
                "image": example[image],
                "label": label_of(example) if labeled else tf.constant(0, tf.int64),
            }
        )

    def label_of(example):
        found = tf.debugging.assert_non_negative(example[label], f"{refused}, in part")
        with tf.control_dependencies([found]):
            return tf.identity(example[label])

    rule = f"data.{field} must be a split with labels"
    refused = f"{rule}. Received: data.{field}={split!r}"
    labeled = label is not None
    try:
        number = int(open(None).cardinality())
    except ValueError as error:
        raise ValueError(
            f"data.{field} must have images of the splits {', '.join(splits)}. "
            f"Received: data.{field}={split!r}"
        ) from error
    if labeled and _has_unlabeled(builder, split, label):
        if needs_labels:
            raise ValueError(refused)
        labeled = False
    # Images of one size are kept decoded, others encoded.
    size = builder.info.dataset_size if encoded else number * int(np.prod(shape))
    if not 0 < size <= MEMORY_LIMIT:  # 0 means unknown
        return StreamedSplit(number, open), labeled
    try:
        with tf.device("CPU"):
            examples = open(None).batch(number).get_single_element()
    except tf.errors.InvalidArgumentError as error:
        if rule not in str(error):
            raise
        raise ValueError(f"{refused}, in part") from error
    return IndexedSplit(examples["image"], examples["label"]), labeled


def _has_unlabeled(builder, split: str, label: str) -> bool:
    """Whether the first image of one of the splits that are joined by "+" has no label."""
    import tensorflow_datasets as tfds

    options = {
        "decoders": tfds.decode.PartialDecoding({label: True}),
        "read_config": tfds.ReadConfig(try_autocache=False),
    }
    return any(
        example[label] < 0
        for part in split.split("+")
        for example in tfds.as_numpy(builder.as_dataset(split=part, **options).take(1))
    )


# -- a folder of images


def _open_folder(data: recipe.Data, needs_labels: bool) -> Source:
    if data.path is None:
        raise ValueError(
            "data.path (--data) must name a folder for the source 'folder'. Received: None"
        )
    root = Path(data.path).expanduser()
    if not root.is_dir():
        near = difflib.get_close_matches(root.name, _entries(root.parent), n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"data.path must be a folder{hint}. Received: data.path={data.path!r}")
    parts = {
        field: _pictures(root, field, getattr(data, field), needs_labels)
        for field in ("train", "test")
    }
    unlabeled = any(UNLABELED in part for part in parts.values())
    if unlabeled:
        parts = {field: {UNLABELED: sum(part.values(), [])} for field, part in parts.items()}
    labels = tuple(sorted(parts["train"]))
    if strange := sorted(parts["test"].keys() - set(labels)):
        raise ValueError(
            f"data.test must have classes of data.train only ({_some(labels)}). "
            f"Received: {_some(strange)} in {root / data.test}"
        )
    if empty := [label for label in labels if not parts["train"][label]]:
        rule = "" if unlabeled else " of every class"
        raise ValueError(
            f"data.train must have images ({', '.join(SUFFIXES)}){rule}. "
            f"Received: none in {_some(empty)}{'' if unlabeled else ' of '}{root / data.train}"
        )
    if not any(parts["test"].values()):
        raise ValueError(f"data.test must have an image. Received: data.test={data.test!r}")
    train, test = (_folder_split(part, labels) for part in parts.values())
    if unlabeled:
        return Source("folder", None, 0, (None, None, 3), train, test)
    return Source("folder", labels, len(labels), (None, None, 3), train, test)


def _pictures(root: Path, field: str, split: str, needs_labels: bool) -> dict[str, list[Path]]:
    """The images of each class; those of a folder without classes as `UNLABELED`."""
    parsed = SLICE.fullmatch(split)
    if parsed is None:
        raise ValueError(
            f"data.{field} must be a sub-folder, or a slice of one as in 'train[:90%]'. "
            f"Received: data.{field}={split!r}"
        )
    folder = root / parsed["folder"]
    classes = sorted(p for p in folder.glob("*") if p.is_dir() and p.name[0] != ".")
    if not classes and not needs_labels and folder.is_dir():
        classes = [folder]
    if not classes:
        raise ValueError(
            f"data.{field} must be a folder with one sub-folder a class. "
            f"Received: data.{field}={split!r}; {root} has: {_listing(root)}. Name one of "
            f"them, or, if these are the classes, data.train='.[:90%]' data.test='.[90%:]'"
        )
    first, last = int(parsed["first"] or 0), int(parsed["last"] or 100)
    found = {}
    for path in classes:
        files = sorted(
            p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.name[0] != "."
        )
        if (first, last) != (0, 100):
            files.sort(key=lambda p: _hash(p.relative_to(folder)))
            files = files[round(len(files) * first / 100) : round(len(files) * last / 100)]
        found[UNLABELED if path == folder else path.name] = files
    return found


def _hash(path: Path) -> bytes:
    return hashlib.sha256(path.as_posix().encode()).digest()


def _folder_split(pictures: dict[str, list[Path]], labels: tuple[str, ...]) -> IndexedSplit:
    paths = [path for files in pictures.values() for path in files]
    numbers = [labels.index(label) for label in pictures]
    numbers = np.repeat(numbers, [len(files) for files in pictures.values()])
    with ThreadPoolExecutor(16) as pool:  # the folder may be on a network drive
        list(pool.map(_check_picture, paths))
    return IndexedSplit([str(path) for path in paths], numbers, read=_read_picture)


def _check_picture(path: Path) -> None:
    """Raises ValueError for a file that is not an image or was cut off.

    TensorFlow's errors in training do not name the file. Only the two ends of the file are read; if
    they do not tell, the image is decoded.
    """
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(max(0, path.stat().st_size - 8))
        end = file.read()
    kind = next((signature for signature in ENDS if start.startswith(signature)), None)
    if kind is None:
        raise ValueError(
            f"{path} must be a JPEG, PNG, BMP or GIF file. Its first bytes are {start!r}"
        )
    if (last := ENDS[kind]) and end.endswith(last):
        return
    try:
        tf.io.decode_image(path.read_bytes(), 3, expand_animations=False)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            f"{path} must be an image that TensorFlow decodes. "
            "It is cut off, damaged or of a rare kind"
        ) from error


def _read_picture(path):
    return tf.io.read_file(path)


# -- parts of messages


def _entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def _listing(folder: Path) -> str:
    return _some([name for name in _entries(folder) if name[0] != "."]) or "nothing"


def _some(names) -> str:
    shown = ", ".join(list(names)[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")
