"""What Prometheus reads."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server. Labels are names of served models, never a client's words."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of_model = {"labelnames": ("model",), "registry": self._registry}
        self.requests = Counter(
            "keras_vit_requests",
            "Requests, by route and HTTP status.",
            ("route", "status"),
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "keras_vit_request_seconds",
            "From the head of a request to the end of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.batch_images = Histogram(
            "keras_vit_batch_images", "Images in a batch.", buckets=SIZES, **of_model
        )
        self.batch_seconds = Histogram(
            "keras_vit_batch_seconds",
            "Seconds of a batch in the engine.",
            buckets=SECONDS,
            **of_model,
        )
        self.queue_images = Gauge("keras_vit_queue_images", "Images that wait.", **of_model)
        self.version = Gauge(
            "keras_vit_version_available",
            "1 for each version that answers.",
            ("model", "version"),
            registry=self._registry,
        )

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)
