"""The texts that `config` fills in: config files with explanations, and the operator's README."""

from collections.abc import Sequence

MODELS = """\
# Which models TensorFlow Serving loads (a ModelServerConfig). The paths are those inside the
# container, where docker-compose.yml shows this folder as /models. The server reads this file again
# every 10 seconds; a model that is removed from it is unloaded.
"""

MODEL = """\
  config {{
    name: "{name}"
    base_path: "{path}"
    model_platform: "tensorflow"
    # The highest version, and the next one as soon as its folder appears; the old one answers until
    # the new one is loaded and warmed up. num_versions: 2 keeps the one before it loaded as well,
    # for the memory of a second model. To stay at one: specific {{ versions: 1 }}
    model_version_policy {{ latest {{ num_versions: 1 }} }}
  }}
"""

BATCHING = """\
# How TensorFlow Serving puts requests together (a BatchingParameters message). One scheduler serves
# all models. The numbers are for CPUs; for a GPU see the end.

# Images in one batch. On a CPU 8 images are nearly as fast as it gets (ViT-B/16 on two cores: 3 to
# 6 % more images a second at 32), so a larger batch would only make its images wait for each other.
# It bounds the memory of one batch as well. Keep requests below it: what the server does with more
# images (refuse them, or cut the request in parts) is not the same in every release.
max_batch_size {{ value: {max_batch_size} }}

# How long a request waits for others, in microseconds. {milliseconds} ms is little beside what one
# image takes (ViT-B/16 on two cores: 50 to 80 ms); with many clients a batch is full before.
batch_timeout_micros {{ value: {batch_timeout_micros} }}

# Batches computed at a time. The products of one batch already use every core, so more threads than
# this would compete for them; the second decodes images while the first computes.
num_batch_threads {{ value: {num_batch_threads} }}

# Batches that wait. What comes on top is refused at once (UNAVAILABLE, HTTP 503), so that a client
# can go elsewhere, in place of an answer that comes too late. Here up to {images} images wait.
# ViT-B/16 on two cores does 13 to 24 a second, and REST gives up after 30 seconds.
max_enqueued_batches {{ value: {max_enqueued_batches} }}

# Left out: allowed_batch_sizes. It pads batches to a few sizes, which helps compilers that want
# fixed shapes; on a CPU without XLA the padding is computed like any image.
# On a GPU: max_batch_size 64 or more, num_batch_threads 2 a GPU, and allowed_batch_sizes 8, 16, 32,
# 64 (the last one must be max_batch_size).
"""

COMPOSE = """\
# TensorFlow Serving with the models of this folder: docker compose up -d
services:
  serving:
    # Pinned: another release may behave differently. It must not be older than the TensorFlow that
    # exported the models ("versions" in a version's MANIFEST.json). Built for x86-64.
    image: {image}
    restart: unless-stopped
    ports:
      # The server asks nobody for a password. Put a proxy that does in front of it before you open
      # these ports to others.
      - "{address}:8500:8500" # gRPC
      - "{address}:8501:8501" # REST
    volumes:
      - .:/models:ro
    environment:
      # oneDNN's fused products, which the exports are made for.
      TF_ENABLE_ONEDNN_OPTS: "1"
    # In place of the image's own script, which names one model by an environment variable.
    entrypoint: ["tensorflow_model_server"]
    command:
      - --port=8500
      - --rest_api_port=8501
      - --model_config_file=/models/models.config
      - --model_config_file_poll_wait_seconds=10
      - --enable_batching=true
      - --batching_parameters_file=/models/batching.config
      - --rest_api_timeout_in_ms=30000
      # Where the container gets fewer cores than the machine has, set these to that number:
      # - --tensorflow_intra_op_parallelism=2
      # - --tensorflow_inter_op_parallelism=2
    security_opt: ["no-new-privileges:true"]
    healthcheck:
      # Every model answers that a version is available.
      test: {check}
      interval: 10s
      timeout: 5s
      retries: 3
      start_period: 120s # loading and warming up
"""

README = """\
# Serving {title} with TensorFlow Serving

Written by `keras-vit serve-config`. The server needs only this folder:

| file | what it is |
|---|---|
| `NAME/VERSION/` | an exported model; its `MANIFEST.json` says what it is and how it was verified |
| `models.config` | which models and versions are served |
| `batching.config` | how requests are batched, with the reason for each number |
| `docker-compose.yml` | starts `{image}` with both |

## Start and stop

```sh
docker compose up -d     # the first start fetches the image
docker compose ps        # "healthy" once every model is loaded
curl http://localhost:8501/v1/models/{name}   # versions and their state
docker compose logs -f serving
docker compose down
```

Models: {models}.

## Send requests

```sh
keras-vit request cat.jpg --url http://localhost:8501/v1/models/{name}
keras-vit request cat.jpg dog.png --url grpc://localhost:8500/{name} --json
```

Without keras_vit, over REST (JPEG or PNG, base64):

```sh
base64 < cat.jpg | tr -d '\\n' |
  sed 's|.*|{{"signature_name": "classify", "instances": [{{"b64": "&"}}]}}|' |
  curl -s -d @- http://localhost:8501/v1/models/{name}:predict
```

| `signature_name` | input | output |
|---|---|---|
| `classify` | `bytes`: JPEG or PNG files | `labels`, `scores`: the top classes of each |
| `serve_bytes` | `bytes`: JPEG or PNG files | `probabilities`, `logits` |
| `serving_default` | `images`: pixels as `MANIFEST.json` says | `probabilities`, `logits` |
| `features` | `images` | `features` |

A model without a head has no classes and fewer signatures;
`curl http://localhost:8501/v1/models/{name}/metadata` lists them. Send `images` over gRPC: as JSON
they are several times larger.

## A new version, and rolling back

Export again: `2/` appears beside `1/` only when it is complete. The server loads it within a
second, warms it up and then unloads `1/`; during the change both are in memory. To copy a version
from another machine, copy it under a name that is not a number, then rename it
(`cp -r ... {name}/.new && mv {name}/.new {name}/2`).

To roll back, write `model_version_policy {{ specific {{ versions: 1 }} }}` in `models.config`, or
remove `2/`. Clients can request a version: `http://localhost:8501/v1/models/{name}/versions/1`.

## What it refuses

- A request with more images than the model was exported for (`max_batch_size` in `MANIFEST.json`).
  Stay at {max_batch_size} (`max_batch_size` in `batching.config`) or below: depending on its
  release, the server refuses or splits requests between the two.
- A wrong rank, size or type, bytes that are neither JPEG nor PNG, a missing model or version: 400
  or 404 with a message. The next request works.
- More than `max_enqueued_batches` waiting: HTTP 503, UNAVAILABLE. Try again later.

Requests in the same batch share its error. A broken file in `bytes` from one client fails the other
requests in the batch, and the number of the image in the message is its position in the batch. If
you do not trust the clients, check the files first, or set `--enable_batching=false` in
`docker-compose.yml` (then only `max_batch_size` in `MANIFEST.json` limits a request).

## What was run, and what was not

The project's tests parse `models.config` and `batching.config` as protocol buffers. They start a
gRPC server with the flags of `docker-compose.yml` around the C++ loader that TensorFlow Serving
uses, and send requests with TensorFlow Serving's own stubs. REST requests, the health check
included, go to `keras-vit serve`, which has the same API.

The image itself was not run, because no package registry has the server. Both servers follow its
source and documentation. Before you rely on this, start it once and send one image.
"""


def readme(names: Sequence[str], image: str, max_batch_size: int) -> str:
    """The operator's README."""
    listed = [f"`{name}`" for name in names]
    return README.format(
        title=", ".join(listed),
        models=", ".join(listed),
        name=names[0],
        image=image,
        max_batch_size=max_batch_size,
    )
