"""A SavedModel behind kserve's REST server, in kserve's own environment: no TensorFlow in it.

TENSORFLOW_FOLDER=... python kserve_server.py MODEL NAME PORT
"""

import base64
import sys

import kserve
import numpy as np
from c_loader import LibraryError, SavedModel


class Served(kserve.Model):
    """Gives what kserve hands over to the C++ runtime, and its outputs back as rows."""

    def __init__(self, name: str, path: str):
        super().__init__(name)
        self.model = SavedModel(path)
        self.ready = True

    def predict(self, payload, headers=None, response_headers=None):
        signature = payload.get("signature_name", "serving_default")
        ((name, info),) = self.model.signatures[signature].inputs.items()
        rows = payload["instances"]
        if info.dtype == "string":
            values = np.array([base64.b64decode(row["b64"]) for row in rows], object)
        else:
            values = np.array(rows, info.dtype)
        try:
            outputs = self.model.run(signature, {name: values})
        except LibraryError as error:
            raise kserve.errors.InvalidInput(str(error)) from None
        rows = {
            key: [[v.decode() for v in row] for row in value] if value.dtype == object else value
            for key, value in outputs.items()
        }
        return {
            "predictions": [
                {key: list(map(_plain, row[i])) for key, row in rows.items()}
                if len(rows) > 1
                else list(map(_plain, next(iter(rows.values()))[i]))
                for i in range(len(values))
            ]
        }


def _plain(value):
    return value if isinstance(value, str) else float(value)


if __name__ == "__main__":
    model, name, port = sys.argv[1:]
    kserve.ModelServer(http_port=int(port), enable_grpc=False, workers=1).start(
        [Served(name, model)]
    )
