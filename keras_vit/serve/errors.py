"""What a request is answered with when it fails: TensorFlow Serving's codes and HTTP's."""

HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "REQUEST_TIMEOUT": 408,
    "PAYLOAD_TOO_LARGE": 413,
    "RESOURCE_EXHAUSTED": 429,
    "CLIENT_CLOSED_REQUEST": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""The HTTP status of each code. Codes that TensorFlow Serving has no word for have HTTP's name."""


class RequestError(Exception):
    """A request that is not answered with a result.

    Args:
        code: A key of `HTTP_STATUS`.
        message: What was wrong, for the client.
        retry_after: Seconds after which it may try again, or None.
        close: Whether to end the connection, because the rest of the body is not read.
    """

    def __init__(
        self, code: str, message: str, retry_after: int | None = None, *, close: bool = False
    ):
        super().__init__(message)
        self.close = close
        self.code = code
        self.status = HTTP_STATUS[code]
        self.retry_after = retry_after


def invalid(message: str) -> RequestError:
    """INVALID_ARGUMENT."""
    return RequestError("INVALID_ARGUMENT", message)
