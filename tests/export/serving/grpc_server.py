"""The official gRPC stubs of TensorFlow Serving around the C API, for tests only.

No package registry has TensorFlow Serving's binary. This program speaks its gRPC services (Predict,
GetModelMetadata, GetModelStatus) with its errors as it words them. It takes the server's own flags
and reads the same config files, and it runs a model through the C API (c_loader.py), so that
loading, running and the errors of the graph are TensorFlow's own. What it does not do: merge
requests into batches (only the limit of a batch is kept), watch folders for new versions, Classify,
Regress, MultiInference, monitoring, TLS, anything about speed. REST is `keras-vit serve`'s.

    python grpc_server.py --volume=SAVEDMODELS:/models --model_config_file=/models/models.config

When the models are loaded and warmed up, it prints one line: {"grpc": PORT}.
"""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from batching_config import BatchingParameters
from c_loader import LibraryError, SavedModel
from google.protobuf import text_format

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)
from tensorflow_serving.config import model_server_config_pb2

INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION = 3, 5, 9
GRPC = {code.value[0]: code for code in grpc.StatusCode}
DEFAULT_SIGNATURE = "serving_default"


class Models:
    """The versions that a ModelServerConfig asks for, loaded and warmed up."""

    def __init__(self, config: Any, batching: Any, folder_of: Any):
        self.limit = batching.max_batch_size.value if batching else None
        self.models: dict[str, dict[int, SavedModel]] = {}
        self.labels: dict[str, dict[str, int]] = {}
        for model in config.model_config_list.config:
            base = folder_of(model.base_path)
            there = sorted(int(p.name) for p in base.iterdir() if p.name.isdecimal())
            policy = model.model_version_policy
            if policy.HasField("specific"):
                wanted = list(policy.specific.versions)
            elif policy.HasField("all"):
                wanted = there
            else:
                wanted = there[-(policy.latest.num_versions or 1) :]
            self.models[model.name] = {n: SavedModel(base / str(n)) for n in wanted}
            self.labels[model.name] = dict(model.version_labels)
            for number in wanted:
                self._warm_up(model.name, number, base / str(number))

    def _warm_up(self, name: str, version: int, folder: Path) -> None:
        """Replays assets.extra/tf_serving_warmup_requests; one that fails fails the load."""
        file = folder / "assets.extra" / "tf_serving_warmup_requests"
        if not file.exists():
            return
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
            request.model_spec.name = name
            request.model_spec.version.value = version
            self.predict(request.model_spec, _tensors(request.inputs))

    def find(self, spec: Any) -> tuple[int, SavedModel]:
        """The version that a ModelSpec names."""
        versions = self.models.get(spec.name, {})
        if spec.version_label:
            if spec.version_label not in self.labels.get(spec.name, {}):
                raise LibraryError(
                    INVALID_ARGUMENT, f"Unrecognized servable version label: {spec.version_label}"
                )
            number = self.labels[spec.name][spec.version_label]
        elif spec.HasField("version"):
            number = spec.version.value
        elif versions:
            number = max(versions)
        else:
            raise LibraryError(NOT_FOUND, f"Servable not found for request: Latest({spec.name})")
        if number not in versions:
            raise LibraryError(
                NOT_FOUND, f"Servable not found for request: Specific({spec.name}, {number})"
            )
        return number, versions[number]

    def predict(
        self, spec: Any, inputs: dict[str, np.ndarray], wanted: list[str] | None = None
    ) -> tuple[int, dict[str, np.ndarray]]:
        """Runs one request after the checks that TF Serving makes in front of the session."""
        number, model = self.find(spec)
        name = spec.signature_name or DEFAULT_SIGNATURE
        if name not in model.signatures:
            raise LibraryError(FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')
        signature = model.signatures[name]
        names = ",".join(signature.inputs)
        if len(inputs) != len(signature.inputs):
            extra, missing = set(inputs) - set(signature.inputs), set(signature.inputs) - {*inputs}
            raise LibraryError(
                INVALID_ARGUMENT,
                f"input size does not match signature: {len(inputs)}!={len(signature.inputs)} "
                f"len({{{','.join(sorted(inputs))}}}) != len({{{names}}}). Sent extra: "
                f"{{{','.join(sorted(extra))}}}. Missing but required: "
                f"{{{','.join(sorted(missing))}}}.",
            )
        for alias in inputs:
            if alias not in signature.inputs:
                raise LibraryError(
                    INVALID_ARGUMENT,
                    f"input tensor alias not found in signature: {alias}. "
                    f"Inputs expected to be in the set {{{names}}}.",
                )
        for alias in wanted or []:
            if alias not in signature.outputs:
                raise LibraryError(
                    INVALID_ARGUMENT,
                    f"output tensor alias not found in signature: {alias} "
                    f"Outputs expected to be in the set {{{','.join(signature.outputs)}}}.",
                )
        self._check_batch(inputs)
        outputs = model.run(name, inputs)
        return number, {key: outputs[key] for key in wanted} if wanted else outputs

    def _check_batch(self, inputs: dict[str, np.ndarray]) -> None:
        if self.limit is None:
            return
        if any(array.ndim == 0 for array in inputs.values()):
            raise LibraryError(
                INVALID_ARGUMENT, "Batching Run() input tensors must have at least one dimension"
            )
        sizes = {len(array) for array in inputs.values()}
        if len(sizes) > 1:
            raise LibraryError(
                INVALID_ARGUMENT, "Batching Run() input tensors must have equal 0th-dimension size"
            )
        if (size := sizes.pop()) > self.limit:
            raise LibraryError(
                INVALID_ARGUMENT,
                f"Task size {size} is larger than maximum input batch size {self.limit}",
            )

    def metadata(self, spec: Any) -> Any:
        """GetModelMetadataResponse with the signature_def."""
        number, model = self.find(spec)
        graph = meta_graph_pb2.MetaGraphDef.FromString(model.meta_graph)
        answer = get_model_metadata_pb2.GetModelMetadataResponse()
        answer.model_spec.name = spec.name
        answer.model_spec.version.value = number
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for name, signature in graph.signature_def.items():
            signatures.signature_def[name].CopyFrom(signature)
        answer.metadata["signature_def"].Pack(signatures)
        return answer

    def status(self, spec: Any) -> Any:
        """GetModelStatusResponse: what is loaded is AVAILABLE."""
        versions = list(self.models.get(spec.name, {}))
        if spec.HasField("version"):
            wanted = spec.version.value
            if wanted not in versions:
                raise LibraryError(
                    NOT_FOUND, f"Could not find version {wanted} of model {spec.name}"
                )
            versions = [wanted]
        if not versions:
            raise LibraryError(NOT_FOUND, f"Could not find any versions of model {spec.name}")
        answer = get_model_status_pb2.GetModelStatusResponse()
        for number in sorted(versions, reverse=True):
            answer.model_version_status.add(version=number, state="AVAILABLE").status.SetInParent()
        return answer


# -- gRPC


def _tensors(inputs: Any) -> dict[str, np.ndarray]:
    tensors = {}
    for alias, proto in inputs.items():
        try:
            tensors[alias] = tf.make_ndarray(proto)
        except (ValueError, TypeError):
            raise LibraryError(INVALID_ARGUMENT, f"tensor parsing error: {alias}") from None
    return tensors


def _proto(array: np.ndarray) -> Any:
    """A TensorProto with its values in the typed field, as TF Serving answers."""
    strings = array.dtype == object
    proto = tf.make_tensor_proto(
        np.zeros(0, "S1" if strings else array.dtype), tf.string if strings else None
    )
    proto.ClearField("tensor_content")
    proto.tensor_shape.Clear()
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    (proto.string_val if strings else proto.float_val).extend(array.ravel().tolist())
    return proto


def _answer(function: Any) -> Any:
    """A servicer's method: a refusal becomes the call's status."""

    def method(self: Any, request: Any, context: Any) -> Any:
        try:
            return function(self, request)
        except LibraryError as error:
            context.abort(GRPC[error.code], str(error))

    return method


class Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    """PredictionService."""

    def __init__(self, models: Models):
        self.models = models

    @_answer
    def Predict(self, request: Any) -> Any:
        spec = request.model_spec
        number, outputs = self.models.predict(
            spec, _tensors(request.inputs), list(request.output_filter)
        )
        answer = predict_pb2.PredictResponse()
        answer.model_spec.name = spec.name
        answer.model_spec.signature_name = spec.signature_name or DEFAULT_SIGNATURE
        answer.model_spec.version.value = number
        for name, array in outputs.items():
            answer.outputs[name].CopyFrom(_proto(array))
        return answer

    @_answer
    def GetModelMetadata(self, request: Any) -> Any:
        if not request.metadata_field:
            raise LibraryError(
                INVALID_ARGUMENT, "GetModelMetadataRequest must specify at least one metadata_field"
            )
        for field in request.metadata_field:
            if field != "signature_def":
                raise LibraryError(INVALID_ARGUMENT, f"Metadata field {field} is not supported")
        return self.models.metadata(request.model_spec)


class Management(model_service_pb2_grpc.ModelServiceServicer):
    """ModelService, its status only."""

    def __init__(self, models: Models):
        self.models = models

    @_answer
    def GetModelStatus(self, request: Any) -> Any:
        return self.models.status(request.model_spec)


# -- the program


def main() -> None:
    """Takes TF Serving's flags, and --volume as Docker does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--volume", required=True)
    parser.add_argument("--model_config_file", required=True)
    parser.add_argument("--batching_parameters_file")
    parser.add_argument("--enable_batching", default="false")
    parser.add_argument("--port", type=int, default=0)
    flags, _ = parser.parse_known_args()
    outside, _, inside = flags.volume.rpartition(":")

    def on_this_side(path: str) -> Path:
        return Path(outside, Path(path).relative_to(inside))

    def read(path: str, message: Any) -> Any:
        return text_format.Parse(on_this_side(path).read_text(), message)

    config = read(flags.model_config_file, model_server_config_pb2.ModelServerConfig())
    batching = None
    if flags.enable_batching == "true":
        batching = read(flags.batching_parameters_file, BatchingParameters())
    models = Models(config, batching, on_this_side)

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(4), options=unlimited)
    predictions, management = Predictions(models), Management(models)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(predictions, server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(management, server)
    port = server.add_insecure_port(f"127.0.0.1:{flags.port}")
    server.start()
    print(json.dumps({"grpc": port}), flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
