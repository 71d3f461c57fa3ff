"""How a seed becomes an input: bytes, JSON and archives, damaged at random.

Every function takes a NumPy generator, so that an input follows from its target and its number.
"""

import io
import json
import zipfile
from collections.abc import Callable

import numpy as np

Random = np.random.Generator

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 32767, 65535, 65536, 1 << 20, (1 << 24) + 1)
NUMBERS += (2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 16, 224, 10**6, 2**31, 2**63, 10**30, 10**400),
    *(
        0.0,
        -0.5,
        1e-300,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "0",
        "x",
        "gelu",
        "\ud800",
        "x" * 999,
    ),
    *([], [0], [1, 2, 3], ["a"], [[]], {}, {"a": 1}, {"": None}, [None] * 40),
)


def damage_bytes(data: bytes, random: Random) -> bytes:
    """A copy with one to eight faults: flipped bits, numbers, blocks removed, moved or repeated."""
    out = bytearray(data)
    for _ in range(1 + int(random.integers(8)) * int(random.integers(2))):
        if not out:
            return bytes(out)
        # Headers are at the start or at the end of most formats.
        span = len(out) if random.random() < 0.5 else min(len(out), 256)
        at = int(random.integers(span))
        at = len(out) - 1 - at if random.random() < 0.3 else at
        match int(random.integers(7)):
            case 0:
                out[at] ^= 1 << int(random.integers(8))
            case 1:
                out[at] = int(random.integers(256))
            case 2 | 3:
                size = (1, 2, 4, 8)[random.integers(4)]
                number = NUMBERS[random.integers(len(NUMBERS))] % (1 << 8 * size)
                order = "little" if random.random() < 0.7 else "big"
                out[at : at + size] = number.to_bytes(size, order)
            case 4:
                del out[at : at + int(random.integers(1, 64))]
            case 5:
                block = out[at : at + int(random.integers(1, 64))]
                to = int(random.integers(len(out)))
                out[to:to] = block
            case 6:
                if random.random() < 0.3:
                    del out[at:]
    return bytes(out)


def damage_json(data: bytes, random: Random) -> bytes:
    """A document with one to three fields of another value, gone, renamed or twice."""
    if random.random() < 0.1:
        return damage_bytes(data, random)
    try:
        value = json.loads(data)
    except ValueError:
        return damage_bytes(data, random)
    for _ in range(1 + int(random.integers(3))):
        value = _damage_value(value, random)
    text = json.dumps(value)
    if random.random() < 0.05:
        text = text.replace("{", '{"twice": 1, "twice": 2, ', 1)
    return text.encode()


def _damage_value(value, random: Random):
    """One place of a tree, of those at the end of a random walk, is changed."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        keys = list(value)
        key = keys[random.integers(len(keys))]
        chance = random.random()
        if chance < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if chance < 0.15:
            return {("x" + k if k == key else k): v for k, v in value.items()}
        return {**value, key: _damage_value(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.5:
        at = int(random.integers(len(value)))
        return [*value[:at], _damage_value(value[at], random), *value[at + 1 :]]
    if type(value) is int and random.random() < 0.4:
        return value + int(random.integers(-3, 4))
    return VALUES[random.integers(len(VALUES))]


def damage_zip(data: bytes, random: Random, inside: dict[str, Callable] | None = None) -> bytes:
    """An archive with a damaged member of a correct checksum, or damaged as bytes.

    Args:
        data: The archive.
        random: The generator.
        inside: The function that damages a member, by the end of its name; default `damage_bytes`.
    """
    if random.random() < 0.4:
        return damage_bytes(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    chosen = int(random.integers(len(members)))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number, (info, content) in enumerate(members):
            if number == chosen:
                found = [f for end, f in (inside or {}).items() if info.filename.endswith(end)]
                content = (found[0] if found else damage_bytes)(content, random)
                if random.random() < 0.1:
                    continue
            again = zipfile.ZipInfo(info.filename)
            deflate = random.random() < 0.1
            again.compress_type = zipfile.ZIP_DEFLATED if deflate else info.compress_type
            archive.writestr(again, content)
    return out.getvalue()


def damage_safetensors(data: bytes, random: Random) -> bytes:
    """A file with a damaged header whose length is right, or damaged as bytes."""
    if random.random() < 0.3 or len(data) < 8:
        return damage_bytes(data, random)
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    fields = json.loads(header)
    meta = fields.get("__metadata__", {})
    if "keras_vit" in meta and random.random() < 0.5:  # the config, which is JSON in JSON
        config = damage_json(meta["keras_vit"].encode(), random).decode(errors="replace")
        header = json.dumps({**fields, "__metadata__": {**meta, "keras_vit": config}}).encode()
    else:
        header = damage_json(header, random)
    return len(header).to_bytes(8, "little") + header + rest


def damage_part(data: bytes, start: bytes, end: bytes, random: Random) -> bytes:
    """Bytes with damage between two marks only, of the same length; else anywhere."""
    first = data.find(start)
    last = data.find(end, first)
    if random.random() < 0.5 or first < 0 or last < 0:
        return damage_bytes(data, random)
    part = damage_json(data[first : last + len(end)], random)
    return (
        data[:first]
        + part.ljust(last + len(end) - first)[: last + len(end) - first]
        + data[last + len(end) :]
    )
