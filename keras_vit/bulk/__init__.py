"""A model over many image files: decoded in parallel, resumable, written atomically."""

from keras_vit.bulk.rows import Progress, Row, Summary
from keras_vit.bulk.run import embed, predict
from keras_vit.bulk.stream import stream
from keras_vit.bulk.workers import RayWorkers

__all__ = ["Progress", "RayWorkers", "Row", "Summary", "embed", "predict", "stream"]
