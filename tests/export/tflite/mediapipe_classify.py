"""What MediaPipe's ImageClassifier says, run by the Python of an environment that has MediaPipe.

    python mediapipe_classify.py < cases.json > answers.json

A case is {"model": a .tflite file, "pictures": an .npy file (B, H, W, C)}; its answer is, for each
picture, the classes [index, name, score] in MediaPipe's order; or {"error": ...} if the file is
not opened.
"""

import json
import sys

import mediapipe
import numpy as np
from mediapipe.tasks.python import BaseOptions, vision


def classify(model, pictures):
    options = vision.ImageClassifierOptions(
        base_options=BaseOptions(model_asset_path=model),
        max_results=-1,  # all of them
    )
    try:
        classifier = vision.ImageClassifier.create_from_options(options)
    except (ValueError, NotImplementedError, RuntimeError, FileNotFoundError) as error:
        return {"error": str(error)}
    with classifier:
        return [_classes(classifier, np.ascontiguousarray(p)) for p in np.load(pictures)]


def _classes(classifier, picture):
    image = mediapipe.Image(image_format=mediapipe.ImageFormat.SRGB, data=picture)
    (found,) = classifier.classify(image).classifications
    return [(c.index, c.category_name, c.score) for c in found.categories]


if __name__ == "__main__":
    json.dump([classify(**case) for case in json.load(sys.stdin)], sys.stdout)
