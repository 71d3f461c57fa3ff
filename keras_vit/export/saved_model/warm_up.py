"""Warm-up requests: what TensorFlow Serving runs on a new version before it lets clients to it.

The file is a TFRecord of PredictionLog messages of tensorflow-serving-api. Only three of its nested
fields are needed, so they are written here by their published numbers and nothing is installed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_vit.export.saved_model.signatures import input_of

PLACE = Path("assets.extra", "tf_serving_warmup_requests")
PREDICT_LOG = 6  # of PredictionLog
REQUEST = 1  # of PredictLog
MODEL_SPEC, INPUTS = 1, 2  # of PredictRequest
NAME, SIGNATURE_NAME = 1, 3  # of ModelSpec


def write_warm_up(folder: Path, signatures: Mapping[str, Any], name: str) -> None:
    """Writes a request of one image for each signature into a version folder.

    A server refuses what is more than its own batch, and with it the whole version; one image is
    never too many.
    """
    import tensorflow as tf

    path = folder / PLACE
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for signature, function in sorted(signatures.items()):
            spec = input_of(function)
            tensor = _tensor(spec).SerializeToString()
            entry = _field(1, spec.name.encode()) + _field(2, tensor)  # of a map
            model = _field(NAME, name.encode()) + _field(SIGNATURE_NAME, signature.encode())
            request = _field(MODEL_SPEC, model) + _field(INPUTS, entry)
            writer.write(_field(PREDICT_LOG, _field(REQUEST, request)))


def _tensor(spec: Any) -> Any:
    """One picture as a TensorProto: grey, of which a single value stands for all."""
    import tensorflow as tf

    if spec.dtype == tf.string:
        file = tf.io.encode_jpeg(tf.fill([64, 64, 3], tf.constant(128, tf.uint8))).numpy()
        return tf.make_tensor_proto([file])
    shape = [1, *spec.shape[1:]]
    proto = tf.make_tensor_proto(0, spec.dtype, [])
    proto.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
    return proto


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([*_varint(number << 3 | 2), *_varint(len(payload))]) + payload


def _varint(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
