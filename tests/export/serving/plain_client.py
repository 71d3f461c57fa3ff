"""A client as others write it: urllib, and TF Serving's stubs. It knows nothing of keras_vit."""

import json
import urllib.error
import urllib.request

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

TIMEOUT = 60
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def rest(port, path, body=None):
    """The status and the JSON of one request; a body is JSON, or bytes as they are."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models/{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def predict(port, model, inputs, signature="", version=None, outputs=()):
    """The arrays of a gRPC Predict, or the status it ended with."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = signature
    if version is not None:
        request.model_spec.version.value = version
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    request.output_filter.extend(outputs)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        try:
            answer = stub.Predict(request, timeout=TIMEOUT)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return {name: tf.make_ndarray(value) for name, value in answer.outputs.items()}


def metadata(port, model):
    """Of each signature, the inputs and outputs: type and sizes."""
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = model
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.GetModelMetadata(request, timeout=TIMEOUT)
    found = get_model_metadata_pb2.SignatureDefMap()
    answer.metadata["signature_def"].Unpack(found)

    def describe(infos):
        return {
            name: (tf.as_dtype(info.dtype).name, [dim.size for dim in info.tensor_shape.dim])
            for name, info in infos.items()
        }

    return {
        name: (describe(signature.inputs), describe(signature.outputs))
        for name, signature in found.signature_def.items()
        if not name.startswith("__")
    }


def status(port, model):
    """Versions and their states, or the status the call ended with."""
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = model
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        try:
            answer = stub.GetModelStatus(request, timeout=TIMEOUT)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    state = get_model_status_pb2.ModelVersionStatus.State
    return {v.version: state.Name(v.state) for v in answer.model_version_status}


def batch(*items):
    """Bytes as a tensor of strings."""
    return np.array(items, object)
