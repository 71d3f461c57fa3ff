"""What the tests of training share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_pipelines():
    """Leaves TensorFlow's graphs as they are written: pipelines of a few images are never slow.

    Optimizing them took a quarter of the time of these tests. The graphs that users get are
    exported, killed and measured with their optimizations in tests/export, tests/faults and
    benchmarks/.
    """
    tf = pytest.importorskip("tensorflow")
    settings = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **settings})
