"""Sums that a loss needs beside its own pass over the rows, each in an order that depends on the shape alone."""

import cuda.tile as ct

from kernel_src.prebuild import INT, Array, Params, Variant
from kernel_src.segments import two_sums

Const = ct.Constant[int]


@ct.kernel
def row_sum(partial, out, PARTS: Const):
    """partial: [rows, pieces] fp32; out: [rows] fp32. One row a block."""
    ct.grid_dependency_control_wait()
    row = ct.bid(0)
    acc = ct.zeros((PARTS,), dtype=ct.float32)
    for i in range(ct.cdiv(partial.shape[1], PARTS)):
        acc = acc + ct.gather(partial, (row, i * PARTS + ct.arange(PARTS, dtype=ct.int32)), check_bounds=True, padding_value=0)
    ct.scatter(out, row, ct.sum(acc, 0), check_bounds=False)


@ct.kernel
def span_sum(values, out, SPAN: Const):
    """values: [n] fp32; out: [ceil(n / SPAN)] fp32, the sum of every SPAN of them."""
    ct.grid_dependency_control_wait()
    at = ct.bid(0) * SPAN + ct.arange(SPAN, dtype=ct.int32)
    ct.scatter(out, ct.bid(0), ct.sum(ct.gather(values, at, check_bounds=True, padding_value=0), 0), check_bounds=False)


@ct.function
def counted(labels, at, ignore_index, classes):
    """1 where there is a label that is not ignore_index and lies in [0, classes), else 0. classes: -1 where any label will do."""
    label = ct.gather(labels, at, check_bounds=True, padding_value=0)
    counts = (at < labels.shape[0]) & (label != ignore_index) & ((classes < 0) | ((label >= 0) & (label < classes)))
    return ct.where(counts, 1.0, 0.0)


@ct.kernel
def inverse_count(labels, out, ignore_index: int, classes: int, TILE: Const):
    """labels: [n] int64; out: [1] fp32, one over the number of labels that count, or 1 where none does."""
    ct.grid_dependency_control_wait()
    acc = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(labels.shape[0], TILE)):
        acc = acc + counted(labels, i * TILE + ct.arange(TILE, dtype=ct.int32), ignore_index, classes)
    ct.scatter(out, 0, 1.0 / ct.maximum(ct.sum(acc, 0), 1.0), check_bounds=False)


@ct.kernel
def counted_mean(losses, labels, mean, inverse, ignore_index: int, classes: int, TILE: Const):
    """losses: [n] fp32; mean: [1] fp32, their sum divided by the number of labels that count; inverse: as `inverse_count`. One block."""
    ct.grid_dependency_control_wait()
    acc = ct.zeros((TILE,), dtype=ct.float32)
    total = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(labels.shape[0], TILE)):
        at = i * TILE + ct.arange(TILE, dtype=ct.int32)
        acc = acc + counted(labels, at, ignore_index, classes)
        total = total + ct.gather(losses, at, check_bounds=True, padding_value=0)
    number, loss = two_sums(acc, total, TILE)
    one = 1.0 / ct.maximum(number, 1.0)
    ct.scatter(inverse, 0, one, check_bounds=False)
    ct.scatter(mean, 0, loss * one, check_bounds=False)


def variants():
    vector, matrix = Array("float32", (None,), aligned=False), Array("float32", (None, None), aligned=False)
    yield Variant(row_sum, {"partial": matrix, "out": vector, "PARTS": 64})
    yield Variant(span_sum, {"values": vector, "out": vector, "SPAN": 16384}, hints={"num_worker_warps": 8})
    labels = Array("int64", (None,), aligned=False)
    yield Variant(inverse_count, {"labels": labels, "out": vector, "ignore_index": INT, "classes": INT, "TILE": 4096})
    outputs: Params = {"mean": vector, "inverse": vector, "ignore_index": INT, "classes": INT}
    yield Variant(counted_mean, {"losses": vector, "labels": labels, **outputs, "TILE": 4096})
