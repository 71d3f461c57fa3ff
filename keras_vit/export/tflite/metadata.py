"""The metadata of a TFLite file: for the Task libraries of phones and browsers, and for us.

A TFLite file has named pieces of metadata. `TFLITE_METADATA` is what MediaPipe's tasks read: how
pixels become the input, and which file has the names of the classes. That file is appended to the
model as an archive. `RECORD` is ours: JSON with all that our own runtime needs.

Of the many tables of the Task libraries' schema only seven are needed. They are written here by
their published field numbers.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.runtime.base import RECORD
from keras_vit.runtime.tflite_file import litert

LABELS = "labels.txt"
TASKS = "TFLITE_METADATA"
ALIGNMENT = 16  # of weights in the file, as its schema asks for
COLORS = {1: 2, 3: 1}  # channels: GRAYSCALE or RGB
AXIS_LABELS, IMAGE_PROPERTIES, NORMALIZATION = 2, 2, 1  # of enumerations and unions
PARSER = "1.0.0"  # the first version of the libraries that reads all of this
INPUT = "Pixels of one picture"
OUTPUTS = {
    "probabilities": "A probability for each class",
    "logits": "A logit for each class",
    "features": "What a head would read",
}


def add_metadata(content: bytes, record: Mapping[str, Any], name: str, description: str) -> bytes:
    """Adds metadata to a TFLite file, and names its input and output.

    Args:
        content: A TFLite file with one input and one output, without metadata of these names.
        record: Facts that JSON can hold, with `config`, `labels`, `output` and `images` at least.
        name: The model's name.
        description: What the model is, for people.

    Returns:
        The file's content: the model, followed by an archive with the labels if there are any.
    """
    schema = litert("schema_py_generated")
    import flatbuffers  # comes with LiteRT

    class Aligned(schema.BufferT):
        """A buffer that stays aligned, as the Python bindings do not ensure."""

        def Pack(self, builder):
            data = None
            if self.data is not None and len(self.data):
                data = _aligned(builder, bytes(self.data))
            schema.BufferStart(builder)
            if data is not None:
                schema.BufferAddData(builder, data)
            return schema.BufferEnd(builder)

    model = schema.ModelT.InitFromPackedBuf(content)
    labels = record["labels"] if record["output"] != "features" else None
    tasks = _task_metadata(record, name, description, bool(labels))
    pieces = {TASKS: tasks, RECORD: json.dumps(record).encode()}
    model.buffers = [Aligned(data=_data(buffer, content)) for buffer in model.buffers]
    model.metadata = list(model.metadata or [])
    for key, data in pieces.items():
        model.metadata.append(schema.MetadataT(name=key, buffer=len(model.buffers)))
        model.buffers.append(Aligned(data=data))
    model.description = description
    graph = model.subgraphs[0]
    graph.tensors[graph.inputs[0]].name = "images"
    graph.tensors[graph.outputs[0]].name = record["output"]
    builder = flatbuffers.Builder(len(content) + sum(map(len, pieces.values())) + 1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return _with_labels(bytes(builder.Output()), labels)


def _data(buffer: Any, content: bytes) -> Any:
    """A buffer's bytes, which large files keep after the FlatBuffer instead of in it."""
    if buffer.offset > 1:  # 1 is a placeholder
        return content[buffer.offset : buffer.offset + buffer.size]
    return buffer.data


def _with_labels(content: bytes, labels: Sequence[str] | None) -> bytes:
    """The model with its labels appended, uncompressed because that is all the readers know."""
    if not labels:
        return content
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as archive:
        entry = zipfile.ZipInfo(LABELS)  # its date is always the same
        archive.writestr(entry, "".join(f"{label}\n" for label in labels))
    return file.getvalue()


def _task_metadata(
    record: Mapping[str, Any], name: str, description: str, has_labels: bool
) -> bytes:
    """A ModelMetadata with one SubGraphMetadata, which has a TensorMetadata for each side."""
    config = ViTConfig.from_dict(record["config"])
    to = _Writer()
    units: list[int] = []
    if record["images"] == "float32":  # (pixel - mean) / std, from 0 to 255
        mean, std = (
            to.floats(255 * np.broadcast_to(np.float32(value), config.in_channels))
            for value in (config.pixel_mean, config.pixel_std)
        )
        units = [to.table(Byte(NORMALIZATION), to.table(mean, std))]  # a ProcessUnit
    content = None
    if config.in_channels in COLORS:
        colors = to.table(Byte(COLORS[config.in_channels]))
        content = to.table(Byte(IMAGE_PROPERTIES), colors)
    files: list[int] = []
    if has_labels:
        about = to.text("Names of the classes, one a line")
        files = [to.table(to.text(LABELS), about, Byte(AXIS_LABELS))]
    output = record["output"]
    # name, description, dimension_names, content, process_units, stats, associated_files
    takes = (to.text("images"), to.text(INPUT), None, content, to.vector(units))
    gives = (to.text(output), to.text(OUTPUTS[output]), None, None, None, None, to.vector(files))
    # name, description, input_tensor_metadata, output_tensor_metadata
    sides = [to.vector([to.table(*fields)]) for fields in (takes, gives)]
    graphs = to.vector([to.table(None, None, *sides)])
    # name, description, version, subgraph_metadata, author, license, associated_files, min_parser
    fields = (to.text(name), to.text(description), None, graphs, None, None, None, to.text(PARSER))
    return to.finished(to.table(*fields))


class Byte(int):
    """A number in a table, where other ints are offsets of what was written before."""


class _Writer:
    """Writes tables of a FlatBuffer by the numbers of their fields."""

    def __init__(self):
        import flatbuffers

        self.builder = flatbuffers.Builder(1024)
        self.text = self.builder.CreateString
        self.floats = self.builder.CreateNumpyVector

    def table(self, *fields: int | None) -> int:
        """A table with these fields from number 0 on; None leaves one out."""
        self.builder.StartObject(len(fields))
        for number, field in enumerate(fields):
            if isinstance(field, Byte):
                self.builder.PrependInt8Slot(number, int(field), 0)
            elif field is not None:
                self.builder.PrependUOffsetTRelativeSlot(number, field, 0)
        return self.builder.EndObject()

    def vector(self, places: Sequence[int]) -> int | None:
        if not places:
            return None
        self.builder.StartVector(4, len(places), 4)
        for place in reversed(places):
            self.builder.PrependUOffsetTRelative(place)
        return self.builder.EndVector()

    def finished(self, root: int) -> bytes:
        self.builder.Finish(root, b"M001")
        return bytes(self.builder.Output())


def _aligned(builder: Any, data: bytes) -> int:
    builder.StartVector(1, len(data), ALIGNMENT)
    builder.head -= len(data)
    builder.Bytes[builder.head : builder.head + len(data)] = data
    builder.vectorNumElems = len(data)
    return builder.EndVector()
