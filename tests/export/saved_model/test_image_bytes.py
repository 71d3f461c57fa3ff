"""Encoded pictures inside a graph: the pixels of `preprocess`, or an error that says which."""

import io
import struct
import zlib

import numpy as np
import pytest
from conformance import tiny_model
from PIL import Image

from keras_vit import ViTConfig, preprocessing, runtime
from keras_vit.export.saved_model.export import export_saved_model
from keras_vit.export.verify import FILES_BOUND

pytestmark = pytest.mark.backend_free

MODES = ("RGB", "L", "CMYK", "RGBA", "LA", "P", "1")


def config(method="bilinear", **changes):
    fields = {"image_size": (24, 16), "patch_size": 8, "resize_method": method, **changes}
    return ViTConfig(pixel_mean=0.0, pixel_std=1 / 255, **fields)  # which leaves 0..255


def picture(height=37, width=61, seed=0):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    noise = rng.integers(-20, 21, (height, width, 3))
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height)), int)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype("uint8"))


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def expected(file, pixels):
    return preprocessing.preprocess(Image.open(io.BytesIO(file)), pixels)[0]


@pytest.fixture(scope="module")
def graphs():
    """One graph for each config, as a signature is: nothing is known of the batch."""
    import tensorflow as tf

    from keras_vit.export.saved_model.image_bytes import decode

    made = {}

    def graph(pixels, max_pixels=1 << 20):
        if (pixels, max_pixels) not in made:
            made[pixels, max_pixels] = tf.function(
                lambda files: decode(files, pixels, max_pixels),
                input_signature=[tf.TensorSpec([None], tf.string)],
            )
        return lambda files: made[pixels, max_pixels](
            tf.constant(files, tf.string, shape=[len(files)])
        ).numpy()

    return graph


def files_of_every_kind():
    alpha = Image.fromarray((np.arange(37 * 61) % 256).astype("uint8").reshape(37, 61))
    for mode in MODES:
        image = picture().convert(mode)
        if mode == "RGBA":
            image.putalpha(alpha)
        if mode in ("RGB", "L", "CMYK"):
            yield f"JPEG {mode}", encode(image, quality=90)
        if mode != "CMYK":
            yield f"PNG {mode}", encode(image, "PNG")
    deep = np.asarray(picture().convert("L")).astype("uint16") * 257 - 3
    yield "PNG of 16 bits, gray", encode(Image.fromarray(deep), "PNG")
    yield "progressive", encode(picture(), progressive=True, subsampling=2)
    yield "transparent color", encode(picture().convert("P"), "PNG", transparency=3)
    tags = Image.Exif()
    tags[0x0112] = 6  # to be turned by a quarter, back to what it was
    turned = picture().transpose(Image.Transpose.ROTATE_90)
    yield "EXIF", encode(turned, exif=tags)


@pytest.mark.parametrize("channels", [1, 3])
def test_decode_has_pils_pixels_for_every_kind_of_file(graphs, channels):
    pixels = config(image_size=(40, 64), in_channels=channels, resize_method="bicubic")
    names, files = zip(*files_of_every_kind(), strict=True)
    images = graphs(pixels)(files)
    assert images.dtype == np.uint8
    for name, file, image in zip(names, files, images, strict=True):
        difference = np.abs(expected(file, pixels) - image)
        assert difference.max() <= 1.01 and difference.mean() < 0.01, name
        # A picture that is turned, or another one, is far away.
        assert np.abs(expected(file, pixels) - image[::-1]).mean() > 5, name


@pytest.mark.only_on("tensorflow")  # elsewhere, an export starts a process on TensorFlow
@pytest.mark.parametrize("channels", [1, 3])
def test_export_has_the_model_s_logits_for_every_kind_of_file(tmp_path, channels):
    model = tiny_model(in_channels=channels)
    export_saved_model(model, tmp_path)
    names, files = zip(*files_of_every_kind(), strict=True)
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    wanted = runtime.KerasRuntime(model).logits(preprocessing.preprocess(pictures, model.config))
    found = runtime.open(tmp_path).run("serve_bytes", bytes=files)["logits"]
    bound = FILES_BOUND * np.ptp(wanted)
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        assert np.abs(ours - theirs).max() < bound, name
        assert ours.argmax() == theirs.argmax(), name
    others = preprocessing.preprocess([p.rotate(180) for p in pictures], model.config)
    assert (np.abs(found - runtime.KerasRuntime(model).logits(others)).max(-1) > bound).all()


def test_decode_takes_the_upper_8_of_16_bits(graphs):
    import tensorflow as tf

    pixels = config()
    for channels in (1, 2, 3, 4):
        values = np.random.default_rng(channels).integers(0, 65536, (37, 61, channels))
        file = tf.io.encode_png(values.astype("uint16")).numpy()
        upper = (values[..., :1] if channels < 3 else values[..., :3]) >> 8
        wanted = preprocessing.preprocess(upper.astype("uint8"), pixels)[0]
        difference = np.abs(graphs(pixels)([file])[0] - wanted)
        assert difference.max() <= 1.01 and difference.mean() < 0.01, channels


@pytest.mark.parametrize("crop_fraction", [None, 0.875])
@pytest.mark.parametrize("method", ["bilinear", "bicubic", "lanczos", "nearest"])
def test_decode_resizes_as_pil(graphs, method, crop_fraction):
    pixels = config(method, crop_fraction=crop_fraction)
    sizes = [(37, 61), (61, 37), (24, 16), (1, 7), (9, 1), (13, 11), (300, 201), (48, 32)]
    files = [encode(picture(*size), "PNG") for size in sizes]
    several = graphs(pixels)(files)
    for size, file, image in zip(sizes, files, several, strict=True):
        difference = np.abs(expected(file, pixels) - image)
        # Where PIL rounds a half to one side, a float may round it to the other, on both axes.
        assert difference.max() <= 2.01 and difference.mean() < 0.15, size
        np.testing.assert_array_equal(graphs(pixels)([file])[0], image)  # alone, too


def test_decode_of_no_pictures_is_no_pictures(graphs):
    assert graphs(config())([]).shape == (0, 24, 16, 3)


def png_header(width, height):
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def jpeg_header(width, height):
    """A whole little JPEG whose header says that it is large."""
    file = encode(picture())
    start = file.index(b"\xff\xc0") + 5
    return file[:start] + struct.pack(">HH", height, width) + file[start + 4 :]


DAMAGED = "cut off or damaged"


def bad_files():
    jpeg, png = encode(picture()), encode(picture(), "PNG")
    too_many = "pixels are too many; at most 1048576"
    return {
        "empty": (b"", "neither a JPEG nor a PNG"),
        "text": (b"hello", "neither a JPEG nor a PNG"),
        "GIF": (encode(picture(), "GIF"), "neither a JPEG nor a PNG"),
        "BMP": (encode(picture(), "BMP"), "neither a JPEG nor a PNG"),
        "large JPEG": (jpeg_header(65500, 65500), f"65500 x 65500 {too_many}"),
        "large PNG": (png_header(2**31 - 1, 2**31 - 1), too_many),
        "tall PNG": (png_header(1, 2**20), f"1048576 x 1 {too_many}"),  # 16 wide in between
        "cut JPEG": (jpeg[: len(jpeg) // 2], DAMAGED),
        "JPEG without an end": (jpeg[:-2], DAMAGED),
        "JPEG of 3 bytes": (jpeg[:3], DAMAGED),
        "cut PNG": (png[:-30], DAMAGED),
        "PNG of 8 bytes": (png[:8], DAMAGED),
        "PNG of 20 bytes": (png[:20], DAMAGED),
        "PNG without pixels": (png_header(0, 5), DAMAGED),
        "PNG of negative size": (png_header(2**31 + 5, 5), DAMAGED),
        "PNG with a wrong checksum": (png[:60] + b"abcd" + png[64:], DAMAGED),
    }


def test_decode_names_each_bad_picture_and_goes_on(graphs):
    import tensorflow as tf

    run, good = graphs(config()), encode(picture())
    wanted = run([good])
    for name, (file, reason) in bad_files().items():
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            run([good, good, file, good])
        assert "image 2: " in error.value.message and reason in error.value.message, name
        assert error.value.message.count("image ") == 1, name
        # Alone, what is damaged inside gets the decoder's words.
        alone = f"image 0: .*{reason}" + "|Invalid (JPEG|PNG) data" * (reason == DAMAGED)
        with pytest.raises(tf.errors.InvalidArgumentError, match=alone):
            run([file])
        np.testing.assert_array_equal(run([good, good])[1:], wanted)


def test_decode_names_eight_bad_pictures_at_most(graphs):
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"image 7: [^;]*; and 3 more"):
        graphs(config())([b"text"] * 11)


def test_decode_bounds_what_a_picture_is_resized_to(graphs):
    """A narrow picture has few pixels, and many once its short side covers the model's."""
    import tensorflow as tf

    narrow = encode(Image.new("RGB", (9000, 1)), "PNG")
    pixels = config(crop_fraction=0.5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 x 9000 pixels are too many"):
        graphs(pixels)([narrow])
    assert graphs(config())([narrow]).shape == (1, 24, 16, 3)
