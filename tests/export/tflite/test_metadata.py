"""What a TFLite file says of itself, read back with a reader that knows FlatBuffers alone."""

import functools
import io
import json
import struct
import zipfile

import numpy as np
import pytest
from conformance import TINY, tiny_model

from keras_vit.export.fold import fold
from keras_vit.export.tflite.metadata import add_metadata
from keras_vit.export.tflite.operators import to_float32_tflite
from keras_vit.export.tflite.quantize import quantize_file

pytestmark = pytest.mark.backend_free
LABELS = ["rose", "tulip, red", "Gänseblümchen"]


class Table:
    """A table in a FlatBuffer: fields by number, as the format's own description has them."""

    def __init__(self, data, place):
        self.data, self.place = data, place
        self.fields = place - struct.unpack_from("<i", data, place)[0]

    @classmethod
    def root(cls, data):
        return cls(data, struct.unpack_from("<I", data)[0])

    def _at(self, number):
        size = struct.unpack_from("<H", self.data, self.fields)[0]
        offset = 4 + 2 * number
        found = struct.unpack_from("<H", self.data, self.fields + offset)[0] if offset < size else 0
        return self.place + found if found else None

    def byte(self, number):
        place = self._at(number)
        return None if place is None else self.data[place]

    def _target(self, number):
        place = self._at(number)
        return None if place is None else place + struct.unpack_from("<I", self.data, place)[0]

    def table(self, number):
        place = self._target(number)
        return None if place is None else Table(self.data, place)

    def vector(self, number, kind):
        place = self._target(number)
        if place is None:
            return ()
        count = struct.unpack_from("<I", self.data, place)[0]
        return struct.unpack_from(f"<{count}{kind}", self.data, place + 4)

    def text(self, number):
        return bytes(self.vector(number, "B")).decode()

    def tables(self, number):
        first = (self._target(number) or 0) + 4
        return [
            Table(self.data, first + 4 * i + offset)
            for i, offset in enumerate(self.vector(number, "I"))
        ]


def pieces(content):
    """The metadata of a file by name: Model.metadata is field 6, Model.buffers field 4."""
    model = Table.root(content)
    buffers = model.tables(4)
    found = {}
    for piece in model.tables(6):
        (buffer,) = struct.unpack_from("<I", content, piece._at(1))
        found[piece.text(0)] = bytes(buffers[buffer].vector(0, "B"))
    return found


@functools.cache
def converted():
    """A file without metadata. What is said of it is the record's alone."""
    how = {"batch_size": 1, "output": "probabilities", "images": "float32"}
    return to_float32_tflite(fold(tiny_model()), **how, activation="softmax")


def record(config, **changes):
    fields = {"config": config.to_dict(), "labels": LABELS, "output": "probabilities"}
    return {**fields, "images": "float32", **changes}


def with_metadata(content, fields):
    return add_metadata(content, fields, "flowers", "Flowers of a garden")


def tensors(content):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    (entry,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    x = np.random.default_rng(0).normal(size=entry["shape"]).astype(entry["dtype"])
    interpreter.set_tensor(entry["index"], x)
    interpreter.invoke()
    return entry["name"], result["name"], interpreter.get_tensor(result["index"])


def test_task_libraries_find_pixels_and_labels():
    config = TINY.replace(pixel_mean=(0.1, 0.4, 0.2), pixel_std=0.25)
    content = with_metadata(converted(), record(config))
    tasks = pieces(content)["TFLITE_METADATA"]
    assert tasks[4:8] == b"M001"
    root = Table.root(tasks)
    assert (root.text(0), root.text(1)) == ("flowers", "Flowers of a garden")
    assert root.text(7) == "1.0.0"
    (graph,) = root.tables(3)
    (images,), (output,) = graph.tables(2), graph.tables(3)
    assert (images.text(0), output.text(0)) == ("images", "probabilities")
    properties = images.table(3)
    assert properties.byte(0) == 2 and properties.table(1).byte(0) == 1  # ImageProperties, RGB
    (unit,) = images.tables(4)
    assert unit.byte(0) == 1  # NormalizationOptions
    np.testing.assert_allclose(unit.table(1).vector(0, "f"), [25.5, 102, 51], rtol=1e-6)
    np.testing.assert_allclose(unit.table(1).vector(1, "f"), [63.75] * 3, rtol=1e-6)
    (file,) = output.tables(6)
    assert file.byte(2) == 2  # TENSOR_AXIS_LABELS
    archive = zipfile.ZipFile(io.BytesIO(content))
    (entry,) = archive.infolist()
    assert entry.filename == file.text(0) == "labels.txt"
    assert entry.compress_type == zipfile.ZIP_STORED  # the libraries read no other
    assert archive.read(entry).decode().splitlines() == LABELS


def test_task_libraries_are_told_only_what_is_so():
    fields = record(TINY.replace(in_channels=1), images="uint8", labels=None)
    content = with_metadata(converted(), fields)
    (graph,) = Table.root(pieces(content)["TFLITE_METADATA"]).tables(3)
    (images,), (output,) = graph.tables(2), graph.tables(3)
    assert images.table(3).table(1).byte(0) == 2  # GRAYSCALE
    assert not images.tables(4) and not output.tables(6)  # pixels are taken as they are
    assert not zipfile.is_zipfile(io.BytesIO(content))
    content = with_metadata(converted(), record(TINY.replace(in_channels=5), labels=None))
    (graph,) = Table.root(pieces(content)["TFLITE_METADATA"]).tables(3)
    assert graph.tables(2)[0].table(3) is None
    content = with_metadata(converted(), record(TINY, output="features"))
    assert not zipfile.is_zipfile(io.BytesIO(content))


def test_our_own_record_is_json_in_the_file():
    fields = record(TINY, more=[1, "é"])
    content = converted()
    found = pieces(with_metadata(content, fields))
    assert json.loads(found["keras_vit"]) == fields
    assert set(pieces(content)) < set(found)  # the converter's own stay


@pytest.mark.parametrize("mode", [None, "dynamic"])
def test_model_is_the_same_with_metadata(mode):
    content = converted()
    if mode:
        content = quantize_file(content, mode)
    marked = with_metadata(content, record(TINY))
    *_, before = tensors(content)
    *names, after = tensors(marked)
    np.testing.assert_array_equal(after, before)
    assert names == ["images", "probabilities"]
    buffers = Table.root(marked).tables(4)
    places = [buffer._target(0) for buffer in buffers if buffer._target(0)]
    assert len(places) > 20 and all((place + 4) % 16 == 0 for place in places)
    # All of it is in the FlatBuffer, which is what older runtimes and the Task libraries read.
    assert not any(buffer._at(1) for buffer in buffers)
    assert with_metadata(content, record(TINY)) == marked
