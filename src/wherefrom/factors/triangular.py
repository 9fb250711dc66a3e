"""Matrix products of which only half is needed, computed panel by panel: symmetric sums, and
products and inverses of triangular matrices.

A panel is a strip of rows, with only the columns up to its own end: n panels do (n + 1) / 2n of the
work of the full product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# rows: enough for the matrix units, few enough to skip something
_PANEL = {
    "cpu": 128,
    "cuda": 512,
}
_LONG, _PIECE = 2**14, 2**10  # a sum that is taken in pieces, and their length
_SMALL = 256  # rows of a triangle that is inverted directly
# rows, below which a CPU's product adds position after position to what is there: after millions
# of them the total is larger than what float32 can still add to it
_NARROW = 32


def add_gram(total: Tensor, x: Tensor) -> None:
    """total += x^T x for x [n, p], in total's lower triangle [p, p] and not above its panels."""
    for rows, columns in _panels(total):
        part = total[rows, columns]
        if x.dtype == part.dtype and len(part) >= _NARROW:
            part.addmm_(x[:, rows].T, x[:, columns])
        else:
            part += matmul(x[:, rows].T, x[:, columns])


def add_grams(totals: Sequence[Tensor], x: Tensor, which: Sequence[int]) -> None:
    """`add_gram` of several totals of one size, of which each takes one of the x [m, n, p]."""
    if len(totals) == 1:
        add_gram(totals[0], x[0])
        return
    for rows, columns in _panels(totals[0]):
        products = matmul(x[..., rows].mT, x[..., columns]).unbind()
        torch._foreach_add_(
            [total[rows, columns] for total in totals], [products[place] for place in which]
        )


def symmetric(total: Tensor) -> Tensor:
    """The full matrix [p, p] of which `add_gram` keeps the lower triangle."""
    lower = total.tril()
    return lower + lower.tril(-1).T


def times_lower(x: Tensor, lower: Tensor) -> Tensor:
    """x L^T for x [..., p] and L lower-triangular [rows, p]: [..., rows]."""
    flat = x.flatten(0, -2)
    result = x.new_empty(len(flat), len(lower))
    for rows, columns in _panels(lower):
        torch.mm(flat[:, columns], lower[rows, columns].T, out=result[:, rows])
    return result.unflatten(0, x.shape[:-1])


def times_transposed_lower(x: Tensor, lower: Tensor) -> Tensor:
    """x L for x [..., rows] and L lower-triangular [rows, p]: [..., p]."""
    flat = x.flatten(0, -2)
    result = x.new_empty(len(flat), lower.shape[1])
    for columns, _ in _panels(lower.T):
        torch.mm(flat[:, columns.start :], lower[columns.start :, columns], out=result[:, columns])
    return result.unflatten(0, x.shape[:-1])


def inverse_lower(lower: Tensor) -> Tensor:
    """The inverse of a lower-triangular matrix [p, p], by halves: two smaller inverses and two
    products.
    """
    if len(lower) <= _SMALL:
        return torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
    half = len(lower) // 2
    result = torch.zeros_like(lower)
    result[:half, :half] = first = inverse_lower(lower[:half, :half])
    result[half:, half:] = second = inverse_lower(lower[half:, half:])
    result[half:, :half] = second @ (lower[half:, :half] @ first).neg_()
    return result


def panels(count: int, device: str) -> Iterator[tuple[int, int]]:
    """Where the panels of so many rows begin and end, on a kind of device."""
    step = _PANEL.get(device, 512)
    for start in range(0, count, step):
        # what is left over joins the last panel: a thin one would cost a launch of its own
        last = start + 2 * step > count
        end = count if last else start + step
        yield start, end
        if last:
            return


def _panels(lower: Tensor) -> Iterator[tuple[slice, slice]]:
    """Strips of rows of a lower-triangular matrix, and the columns that are not zero there."""
    for start, end in panels(len(lower), lower.device.type):
        yield slice(start, end), slice(0, end)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, or those of two stacks, accumulated and returned in float32 also where x and y are
    bf16.
    """
    if x.ndim == 3:
        return _matmuls(x, y)
    if x.dtype in (torch.bfloat16, torch.float16):
        if x.is_cuda:
            return torch.mm(x, y, out_dtype=torch.float32)
        return x.float() @ y.float()
    if x.is_cuda or x.shape[1] < _LONG:
        return x @ y
    # few rows, few columns and a very long sum: pieces of it keep all cores at work, and what each
    # reads in its cache
    pieces = x.shape[1] // _PIECE
    whole = pieces * _PIECE
    left = x[:, :whole].unflatten(1, (pieces, _PIECE)).transpose(0, 1)  # [pieces, n, _PIECE]
    right = y[:whole].unflatten(0, (pieces, _PIECE))  # [pieces, _PIECE, m]
    return torch.bmm(left, right).sum(0) + x[:, whole:] @ y[whole:]


def _matmuls(x: Tensor, y: Tensor) -> Tensor:
    if len(x) == 1:
        return matmul(x[0], y[0])[None]
    if x.dtype in (torch.bfloat16, torch.float16):
        if x.is_cuda:
            return torch.bmm(x, y, out_dtype=torch.float32)
        return torch.bmm(x.float(), y.float())
    return torch.bmm(x, y)
