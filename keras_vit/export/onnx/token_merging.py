"""The operator `merge` of `Program` in ONNX, in standard operators."""

from typing import TYPE_CHECKING, Any

from keras_vit.layers.token_merging import LEAST_SQUARE, halves

if TYPE_CHECKING:
    from keras_vit.export.onnx.operators import OnnxOperators


def merge(
    ops: "OnnxOperators", x: Any, k: Any, sizes: Any, start: int, count: int
) -> tuple[Any, Any]:
    """See `Operators.merge`. Tokens are gathered as rows of the flat stream."""
    node, (_, _, tokens, size), width = ops.node, k.shape, x.shape[-1]
    left, dtype = tokens - count, ops.dtype
    a, b = halves(start, tokens)
    k = k if dtype == "float32" else ops.cast(k, "float32")
    m = node("ReduceMean", k, ops.ints(1), shape=(-1, tokens, size), keepdims=0)
    square = node("ReduceSum", ops.multiply(m, m), ops.ints(2), shape=(-1, tokens, 1))
    m = node("Div", m, node("Sqrt", node("Max", square, ops.number(LEAST_SQUARE))))
    m_a = node("Gather", m, ops.ints(*a), shape=(-1, len(a), size), axis=1)
    m_b = node("Gather", m, ops.ints(*b), shape=(-1, len(b), size), axis=1)
    m_b = node("Transpose", m_b, shape=(-1, size, len(b)), perm=[0, 2, 1])
    scores = node("MatMul", m_a, m_b, shape=(-1, len(a), len(b)))
    best = node("ReduceMax", scores, ops.ints(2), shape=(-1, len(a)), keepdims=0)
    _, order = ops.outputs("TopK", best, ops.ints(len(a)), shapes=[best.shape] * 2)  # best first
    source = ops.slice(order, 0, count)  # (B, r), numbers in a
    target = node("ArgMax", scores, shape=best.shape, axis=2, keepdims=0)  # (B, A), numbers in b
    target = node("GatherElements", target, source, shape=source.shape, axis=1)

    zero = node("Mul", ops.slice(order, 0, 1), ops.ints(0))  # (B, 1): as many as there are images
    first = node("Add", zero, ops.ints(tokens))
    first = node("CumSum", first, ops.number(0, "int64"), exclusive=1)  # the first row of each
    parts = [node("Add", zero, ops.ints(*range(start)), shape=(-1, start))] if start else []
    if len(a) > count:
        rest = ops.slice(order, count, len(a))
        places = ops.ints(len(a) - count)  # in their own order
        rest, _ = ops.outputs("TopK", rest, places, shapes=[rest.shape] * 2, largest=0)
        parts.append(node("Gather", ops.table(a), rest, shape=rest.shape))
    parts.append(node("Add", zero, ops.ints(*b), shape=(-1, len(b))))
    kept = ops.concat(parts) if len(parts) > 1 else parts[0]
    kept = node("Add", kept, first)  # (B, T - r), rows of x
    source = node("Add", node("Gather", ops.table(a), source, shape=source.shape), first)

    y = node("Gather", x, kept, shape=(-1, left, width))
    z = node("Gather", x, source, shape=(-1, count, width))
    target = node("Add", target, ops.ints(left - len(b)))  # numbers of what is left
    ends = ops.floats(0.0, 1.0)
    weights = node("OneHot", target, ops.ints(left), ends, shape=(-1, left, count), axis=1)
    if sizes is None:
        own = node("Cast", node("Mul", kept, ops.ints(0)), to=ops.onnx.TensorProto.FLOAT)
        own = node("Add", own, ops.number(1.0))
    else:
        flat = ops.reshape(sizes, -1)
        own = node("Gather", flat, kept, shape=(-1, left))
        more = ops.reshape(node("Gather", flat, source, shape=source.shape), -1, 1, count)
        weights = ops.multiply(weights, more)
    sizes = node("ReduceSum", weights, ops.ints(2), shape=(-1, left), keepdims=0)
    sizes = node("Add", sizes, own)  # (B, T - r)
    weights = node("Div", weights, ops.reshape(sizes, -1, left, 1))
    own = ops.reshape(node("Div", own, sizes), -1, left, 1)
    if dtype != "float32":
        weights, own = ops.cast(weights, dtype), ops.cast(own, dtype)
    y = ops.add(ops.multiply(y, own), node("MatMul", weights, z, shape=y.shape))
    return ops.reshape(y, -1, width), sizes
