"""Requests that are wrong: an error with a reason, and the next request works."""

import base64
import json

import c_loader
import numpy as np
import pytest
import tiny_export

pytestmark = pytest.mark.backend_free

plain = pytest.importorskip("plain_client", reason="tensorflow-serving-api is not installed")

NAME = "flowers"
IMAGES = tiny_export.images(2)
FILE = tiny_export.picture(1)
SHAPE = "[images must have shape (batch, 24, 16, 3). Received: shape ({})]"
NOT_FINITE = "[images must hold finite numbers. Received: NaN or infinite ones in image 0]"
NEITHER, DAMAGED = "it is neither a JPEG nor a PNG file", "its data is cut off or damaged"


@pytest.fixture
def still_works(server, loaded):
    """After the test, both protocols answer as before, and it is the same process."""
    yield
    assert server.process.poll() is None
    expected = loaded("serving_default", IMAGES)["logits"]
    atol = 1e-6 * np.ptp(expected)
    found = plain.predict(server.grpc, NAME, {"images": IMAGES})
    np.testing.assert_allclose(found["logits"], expected, rtol=0, atol=atol)
    body = {"instances": IMAGES.tolist()}
    code, answer = plain.rest(server.rest, f"{NAME}:predict", body)
    assert code == 200
    found = [row["logits"] for row in answer["predictions"]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (np.zeros((24, 16, 3), "float32"), "Task size 24 is larger than maximum"),
        (np.zeros((2, 16, 3), "float32"), SHAPE.format("2, 16, 3")),
        (np.zeros((1, 1, 24, 16, 3), "float32"), SHAPE.format("1, 1, 24, 16, 3")),
        (np.float32(1), "Batching Run() input tensors must have at least one dimension"),
        (np.zeros((1, 32, 16, 3), "float32"), SHAPE.format("1, 32, 16, 3")),
        (np.zeros((1, 24, 16, 1), "float32"), SHAPE.format("1, 24, 16, 1")),
        (np.zeros((1, 0, 16, 3), "float32"), SHAPE.format("1, 0, 16, 3")),
        (np.zeros((1, 24, 16, 3), "float64"), "to be float but double is provided"),
        (np.zeros((1, 24, 16, 3), "int32"), "to be float but int32 is provided"),
        (plain.batch(FILE), "to be float but string is provided"),
        (np.zeros((17, 24, 16, 3), "float32"), "Task size 17 is larger than maximum"),
        (np.zeros((10_000, 24, 16, 3), "float32"), "Task size 10000 is larger than maximum"),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else "",
)
@pytest.mark.usefixtures("still_works")
def test_grpc_refuses_wrong_images(server, images, reason):
    found = plain.predict(server.grpc, NAME, {"images": images})
    assert isinstance(found, tuple), f"answered with {found}"
    assert found[0] == "INVALID_ARGUMENT"
    assert reason in found[1]


@pytest.mark.usefixtures("still_works")
def test_grpc_refuses_wrong_names(server):
    found = plain.predict(server.grpc, NAME, {"image": IMAGES})
    assert found == (
        "INVALID_ARGUMENT",
        "input tensor alias not found in signature: image. "
        "Inputs expected to be in the set {images}.",
    )
    found = plain.predict(server.grpc, NAME, {})
    assert found[0] == "INVALID_ARGUMENT" and "Missing but required: {images}." in found[1]


@pytest.mark.usefixtures("still_works")
def test_empty_batch_is_answered_with_none(server):
    for signature, value, names in (
        ("", IMAGES[:0], {"logits", "probabilities"}),
        ("classify", plain.batch(), {"labels", "scores"}),
    ):
        name = "bytes" if signature else "images"
        found = plain.predict(server.grpc, NAME, {name: value}, signature)
        assert {key: array.shape for key, array in found.items()} == dict.fromkeys(names, (0, 3))
    code, answer = plain.rest(server.rest, f"{NAME}:predict", {"instances": []})
    assert code == 400 and "No values in 'instances' array" in answer["error"]


@pytest.mark.usefixtures("still_works")
def test_nan_never_becomes_a_class(server):
    images = IMAGES.copy()
    images[0, 3, 4, 1] = np.nan
    found = plain.predict(server.grpc, NAME, {"images": images})
    assert isinstance(found, tuple), f"answered with {found}"
    assert found[0] == "INVALID_ARGUMENT" and NOT_FINITE in found[1]
    code, answer = plain.rest(server.rest, f"{NAME}:predict", {"instances": images.tolist()})
    assert code == 400 and NOT_FINITE.strip("[]") in answer["error"]
    images[0] = np.linspace(-3e38, 3e38, images[0].size).reshape(images[0].shape)  # overflows
    code, answer = plain.rest(server.rest, f"{NAME}:predict", {"instances": images.tolist()})
    assert code == 400 and NOT_FINITE.strip("[]") in answer["error"]


@pytest.mark.parametrize(
    ("data", "reason", "alone"),
    [
        (b"", NEITHER, f"[image 0: {NEITHER}]"),
        (b"not a picture", NEITHER, f"[image 0: {NEITHER}]"),
        (b"<svg/>", NEITHER, f"[image 0: {NEITHER}]"),
        (FILE[:200], DAMAGED, "Invalid JPEG data, size 200"),  # in TensorFlow's words
        (b"\x89PNG\r\n\x1a\n", DAMAGED, f"[image 0: {DAMAGED}]"),
        (b"BM" + bytes(60), NEITHER, f"[image 0: {NEITHER}]"),
    ],
    ids=["empty", "text", "svg", "truncated", "png head", "bmp"],
)
@pytest.mark.parametrize("signature", ["serve_bytes", "classify"])
@pytest.mark.usefixtures("still_works")
def test_wrong_bytes_are_refused(server, signature, data, reason, alone):
    found = plain.predict(server.grpc, NAME, {"bytes": plain.batch(FILE, data)}, signature)
    assert isinstance(found, tuple), f"answered with {found}"
    assert found[0] == "INVALID_ARGUMENT" and f"[image 1: {reason}]" in found[1]
    body = {"signature_name": signature, "inputs": [{"b64": base64.b64encode(data).decode()}]}
    code, answer = plain.rest(server.rest, f"{NAME}:predict", body)
    assert code == 400 and alone.strip("[]") in answer["error"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "The document is empty"),
        (b"{", "JSON Parse error"),
        (b"[" * 100_000, "JSON Parse error"),
        (b"[1]", "Is not object"),
        ({}, "Missing 'inputs' or 'instances' key"),
        ({"instances": [1], "inputs": [1]}, "expecting only"),
        ({"instances": 1}, "to be an list/array"),
        ({"signature_name": 3, "instances": [1]}, "must be a string value"),
        ({"instances": [["a"]]}, "is not of expected type: float"),
        ({"instances": [[True]]}, "is not of expected type: float"),
        ({"instances": [[1, [2]]]}, "unexpected level"),
        ({"instances": [[[1, 2], [3]]]}, "unexpected size"),
        ({"instances": [[1], [2, 3]]}, "Expecting tensor size: 1 but got: 2"),
        ({"instances": [[1e39]]}, "without loss of precision"),
        ({"instances": [{"pixels": [1]}]}, "does not have named input: pixels"),
        ({"inputs": {"pixels": [1]}}, "Missing named input: images"),
        ({"signature_name": "classify", "instances": [{"b64": "!"}]}, "Unable to base64 decode"),
        ({"signature_name": "classify", "instances": [1]}, "is not of expected type: string"),
        ({"instances": [[0.0] * 4]}, SHAPE.format("1, 4")),
    ],
    ids=lambda value: value if isinstance(value, str) and value else "body",
)
@pytest.mark.usefixtures("still_works")
def test_rest_refuses_wrong_bodies(server, body, reason):
    code, answer = plain.rest(server.rest, f"{NAME}:predict", body)
    assert code == 400
    assert reason.strip("[]") in answer["error"]


@pytest.mark.usefixtures("still_works")
def test_ten_thousand_files_are_refused(server):
    body = {
        "signature_name": "classify",
        "instances": [{"b64": base64.b64encode(FILE).decode()}] * 10_000,
    }
    code, answer = plain.rest(server.rest, f"{NAME}:predict", body)
    assert code == 400
    assert answer["error"] == "Task size 10000 is larger than maximum input batch size 16"


def test_model_bounds_a_request_where_the_server_does_not(exported):
    """Without batching TF Serving has no bound of its own."""
    model = c_loader.SavedModel(exported / "1")
    most = json.loads((exported / "1" / "MANIFEST.json").read_text())["max_batch_size"]
    images = np.zeros((10_000, 24, 16, 3), "float32")
    for count, refused in ((most, False), (most + 1, True), (10_000, True), (1, False)):
        if refused:
            with pytest.raises(
                c_loader.LibraryError, match=f"at most {most} of `images`"
            ) as caught:
                model.run("features", {"images": images[:count]})
            assert caught.value.code == 3
        else:
            assert len(model.run("features", {"images": images[:count]})["features"]) == count
    model.close()


@pytest.mark.usefixtures("still_works")
def test_paths_that_are_none(server):
    for path in ("flowers:guess", "flowers/versions/x:predict", "a/b/c"):
        code, answer = plain.rest(server.rest, path, {"instances": [1]})
        assert code == 400 and "Malformed request: POST" in answer["error"]
