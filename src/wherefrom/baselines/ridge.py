"""The regularised kernel of features, phi_q^T (Phi^T Phi + lambda)^-1 phi_i, and how lambda is
chosen.

It is solved on the smaller side, as [dim, dim] or, where there are fewer images than numbers, as
[N, N]; both are exact. Of a group of processes each adds up the features of some shards of the
store: whole ones, in float32 as a process alone does, and all of them in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..attribution.attributor import Chunks
from ..errors import WherefromError, number
from ..running.ranks import own_part, summed


class Rows(Protocol):
    """First index and features [n, dim] float32, shard after shard; `of`: of those whose first
    index is among these.
    """

    def __call__(self, of: range | None = None, /) -> Iterator[tuple[int, Tensor]]: ...


@dataclass(frozen=True)
class Regularisation:
    """How lambda is chosen; one of the three.

    Args:
        relative: lambda as a multiple of the mean of Phi^T Phi's diagonal.
        absolute: lambda itself; it depends on the scale of the features.
        effective: the effective dimension tr(K (K + lambda)^-1), as a share of the smaller of N and
            dim.
    """

    relative: float | None = None
    absolute: float | None = None
    effective: float | None = None

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("relative", "absolute", "effective")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise WherefromError(
                "give lambda_rel or lambda_abs, or leave both away for the effective-dimension "
                "rule; not both"
            )
        value = getattr(self, given[0])
        if given[0] == "effective":
            value = number("effective_dim, a share,", value, above=0, below=1)
        else:  # above 0: without it the kernel cannot be inverted
            name = "lambda_rel" if given[0] == "relative" else "lambda_abs"
            value = number(name, value, above=0)
        object.__setattr__(self, given[0], value)  # as Python's own, which can be kept

    @classmethod
    def chosen(
        cls, lambda_rel: float | None, lambda_abs: float | None, effective_dim: float
    ) -> Regularisation:
        """The first two where given, and else the effective dimension."""
        if lambda_rel is None and lambda_abs is None:
            return cls(effective=number("effective_dim", effective_dim))
        return cls(lambda_rel, lambda_abs)

    @property
    def about(self) -> dict[str, float]:
        """Which of the three, and its number."""
        given = {"lambda_rel": self.relative, "lambda_abs": self.absolute}
        given["effective_dim"] = self.effective
        return {name: number for name, number in given.items() if number is not None}

    def value(self, kernel: Tensor, dim: int) -> float:
        """lambda for a kernel of either side, float64, of features of `dim` numbers."""
        if self.absolute is not None:
            return self.absolute
        trace = float(kernel.diagonal().sum())
        if self.relative is not None:
            return self.relative * trace / dim
        assert self.effective is not None
        values = torch.linalg.eigvalsh(kernel).clamp_min(0)
        wanted = self.effective * len(values)
        # at `high` the effective dimension is below what is wanted
        low = 1e-14 * trace
        high = trace / wanted
        for _ in range(60):  # halves the range of log lambda each time
            middle = (low * high) ** 0.5
            if float((values / (values + middle)).sum()) > wanted:
                low = middle
            else:
                high = middle
        return high


class Ridge:
    """The kernel of a training set's features.

    Args:
        rows: reads the features, as often as asked.
        count, dim: N and the numbers of a feature.
        regularisation: how lambda is chosen.
        device: where to compute.
    """

    def __init__(
        self,
        rows: Rows,
        count: int,
        dim: int,
        regularisation: Regularisation,
        device: torch.device,
    ) -> None:
        self._rows, self._count, self._device = rows, count, device
        self._dual = count < dim
        if self._dual:
            features = torch.cat([some.to(device) for _, some in rows()])
            kernel = (features @ features.T).double()
        else:
            kernel = torch.zeros(dim, dim, dtype=torch.float64, device=device)
            for _, some in rows(own_part(count)):
                some = some.to(device)
                kernel += some.T @ some
            summed({"kernel": kernel}, "the kernel of the features")
        if not float(kernel.diagonal().sum()) > 0:
            raise WherefromError(
                "every feature is 0: no gradient reaches the tracked layers at these draws"
            )
        self.value = regularisation.value(kernel, dim)
        kernel.diagonal().add_(self.value)
        self._factor, failed = torch.linalg.cholesky_ex(kernel)
        if int(failed):
            raise WherefromError(
                f"the kernel cannot be inverted with lambda = {self.value:.3g}: raise lambda_rel "
                "or lambda_abs, or lower effective_dim"
            )

    def chunks(self, queries: Tensor, of: range | None = None) -> Chunks:
        """phi_q^T (Phi^T Phi + lambda)^-1 phi_i of queries [Q, dim] with all images, piece after
        piece; `of`: with those of the shards that begin there.
        """
        queries = queries.to(self._device)
        if self._dual:  # Phi (Phi^T Phi + lambda)^-1 = (Phi Phi^T + lambda)^-1 Phi
            if of is not None and 0 not in of:  # with few images the pieces are one
                return
            # [Q, N], in float64: the solution would show how the rows are cut into shards
            wide = queries.double()
            products = [wide @ some.to(self._device).double().T for _, some in self._rows()]
            yield 0, torch.cholesky_solve(torch.cat(products, 1).T, self._factor).T.float()
            return
        solved = torch.cholesky_solve(queries.double().T, self._factor).float()  # [dim, Q]
        for first, some in self._rows(of):
            yield first, (some.to(self._device) @ solved).T

    def own(self, queries: Tensor) -> Tensor:
        """phi_q^T (Phi^T Phi + lambda)^-1 phi_q of queries [Q, dim]: [Q] float64."""
        queries = queries.to(self._device).double()
        if self._dual:  # (|phi|^2 - k^T (Phi Phi^T + lambda)^-1 k) / lambda, with k = Phi phi
            rows = [queries @ some.to(self._device).double().T for _, some in self._rows()]
            inside = torch.cat(rows, 1).T  # [N, Q]
            seen = (inside * torch.cholesky_solve(inside, self._factor)).sum(0)
            return ((queries**2).sum(1) - seen).clamp_min(0) / self.value
        half = torch.linalg.solve_triangular(self._factor, queries.T, upper=False)
        return (half**2).sum(0)

    def leverage(self, of: range | None = None) -> Tensor:
        """h_i = phi_i^T (Phi^T Phi + lambda)^-1 phi_i, in [0, 1): [N] float32; `of`: in shards that
        begin elsewhere it may be left at 0.
        """
        if self._dual:  # the diagonal of K (K + lambda)^-1 = 1 - lambda (K + lambda)^-1
            return (
                (1 - self.value * torch.cholesky_inverse(self._factor).diagonal())
                .clamp_min(0)
                .float()
            )
        found = torch.zeros(self._count, device=self._device)
        for first, some in self._rows(of):
            half = torch.linalg.solve_triangular(
                self._factor, some.to(self._device).double().T, upper=False
            )
            found[first : first + len(some)] = (half**2).sum(0).float()
        return found
