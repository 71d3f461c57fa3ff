"""Warm-up requests: what TensorFlow Serving runs on a new version before it serves clients.

The file is a TFRecord of PredictionLog messages of tensorflow-serving-api. Only a few of their
fields are needed. They are written here by their published numbers, so that nothing has to be
installed.
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

    A server refuses a version whose warm-up requests are larger than its batch; one image never is.
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
    """A gray image as a TensorProto; for pixels, a single value that is repeated."""
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
