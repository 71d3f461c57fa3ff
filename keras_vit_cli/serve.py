"""`keras-vit serve`: a server of models, with a page to try them on."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from keras_vit_cli.backend import load_library
from keras_vit_cli.options import CHECKPOINT, Debug, check_source

ENGINES = ("auto", "tensorflow", "onnx", "keras")  # those of keras_vit.serve, which imports Keras
PACKAGES = ("uvicorn", "starlette", "prometheus_client")


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Run folders, .keras, .tflite or .onnx files, SavedModels, folders of numbered "
            f"versions, or checkpoints: {CHECKPOINT}. NAME=MODEL chooses the name in the address.",
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any.")] = 8501,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is every network.")
    ] = "127.0.0.1",
    engine: Annotated[
        str,
        typer.Option(
            help="For models that Keras runs: auto, tensorflow, onnx or keras. An export has its "
            "own engine."
        ),
    ] = "auto",
    max_batch: Annotated[int, typer.Option(min=1, help="Images in a batch or a request.")] = 32,
    max_wait: Annotated[
        float, typer.Option(min=0, help="Milliseconds that a request waits for others.")
    ] = 2.0,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Images that wait for a model; more are answered with 429.")
    ] = 512,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds until a request that waits gets 504.")
    ] = 30.0,
    read_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds in which a request must arrive.")
    ] = 30.0,
    max_body: Annotated[int, typer.Option(min=1, help="Megabytes of a request.")] = 32,
    versions: Annotated[
        int, typer.Option(min=1, help="How many of the newest versions are served.")
    ] = 1,
    poll: Annotated[
        float, typer.Option(min=0, help="Seconds between looks for new versions; 0 is never.")
    ] = 2.0,
    playground: Annotated[
        bool, typer.Option(help="Whether / is a page to try the models on.")
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    debug: Debug = False,
) -> None:
    """Serve models over HTTP, with a page to try them on.

    The API is the REST API of TensorFlow Serving. The page is at /, health at /healthz and /readyz,
    Prometheus' metrics at /metrics. The log is JSON, on stderr. SIGTERM ends the server once what
    it accepted is answered.

    Example: keras-vit serve runs/flowers
    """
    sources = _sources(models)
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise ValueError(f"engine must be one of {known}. Received: engine={engine!r}")
    if log_level not in ("debug", "info", "warning", "error"):
        raise ValueError(
            f"log-level must be debug, info, warning or error. Received: log_level={log_level!r}"
        )
    if missing := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} must be installed to serve: pip install 'keras3-vit[serve]'"
        )
    load_library()
    from keras_vit.serve import Limits, Server, Settings, json_log

    json_log.set_up(log_level)
    settings = Settings(
        host=host,
        port=port,
        engine=engine,
        limits=Limits(max_batch, max_wait / 1000, max_queue, timeout),
        max_body=max_body << 20,
        max_bodies=max(256, max_body) << 20,
        read_timeout=read_timeout,
        keep=versions,
        poll=poll,
        playground=playground,
    )

    def started(server: Server) -> None:
        print(server.url, flush=True)

    Server(sources, settings, started).run()


def _sources(models: list[str]) -> dict[str, str]:
    """The models' paths by name; a name defaults to that of the file or folder."""
    sources: dict[str, str] = {}
    for model in models:
        named = re.fullmatch(r"([\w.-]+)=(.+)", model)
        name, source = named.groups() if named else (None, model)
        check_source("MODEL", source)
        name = name or _name(source)
        if name in sources:
            raise ValueError(
                "MODEL must have a name of its own: pass NAME=MODEL. "
                f"Received: {name!r} twice, for {sources[name]} and {source}"
            )
        sources[name] = source
    return sources


def _name(source: str) -> str:
    """The name of a folder or a file without its suffix; of a version, that of its model."""
    if "://" in source:
        path = Path(re.sub(r"[@?#].*", "", source.partition("://")[2]))
        return re.sub(r"[^\w.-]", "_", path.name)
    path = Path(os.path.abspath(Path(source).expanduser()))
    if path.name.isdecimal() and path.parent.name:
        path = path.parent
    elif path.stem == "model" and path.is_file():
        path = path.parent
    return re.sub(r"[^\w.-]", "_", path.stem if path.is_file() else path.name)
