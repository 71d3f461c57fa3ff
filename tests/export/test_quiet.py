"""What TensorFlow logs during an export."""

import logging

import pytest

from keras_vit.export.quiet import without_infos

pytestmark = pytest.mark.backend_free


def test_infos_are_hidden_and_warnings_are_not(monkeypatch):
    log, seen = logging.getLogger("tensorflow"), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)  # as in a notebook
    log._cache.clear()
    log.info("before")
    with without_infos():
        log.info("Assets written")
        log.warning("unusual")
    log.info("after")
    assert seen == ["before", "unusual", "after"]
