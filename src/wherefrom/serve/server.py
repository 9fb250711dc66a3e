"""The server's routes: the page, and the questions that it asks as JSON, with a description of them
at /api/openapi.json.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Body, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from ..errors import WherefromError
from ..runs.bench import Bench
from . import upload
from .asking import SHOWN, Asking
from .conditions import LONGEST
from .gallery import KEPT
from .guard import Door, Guard
from .items import Without
from .refused import status_of
from .worker import WAITING, Event, Job, Worker

SEEDS = 2**32 - 1
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_LINK = 10_000  # characters that a link may leave out
_IMAGE = {"requestBody": {"content": {"application/octet-stream": {}}, "required": True}}

Cond = Annotated[str | None, Field(max_length=LONGEST)]
Item = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Words = Annotated[str, Field(max_length=10_000)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Enter(_Asked):
    """The token that the server was started with."""

    token: str = Field(max_length=1000)


class Generate(_Asked):
    """A seed, and the class or the caption where the model takes one."""

    seed: Annotated[int, Field(strict=True, ge=0, le=SEEDS)]
    cond: Cond = None


class Group(_Asked):
    """The training images that have this in a column of what is known of them."""

    column: Words
    value: Words


class LeftOut(_Asked):
    """What is left out of a ranking."""

    items: Annotated[list[Item], Field(max_length=10_000)] = []
    groups: Annotated[list[Group], Field(max_length=1000)] = []

    @property
    def without(self) -> Without:
        return Without(self.items, [(group.column, group.value) for group in self.groups])


class Ranking(LeftOut):
    """What is left out, and how many sources are wanted."""

    top_k: Annotated[int, Field(strict=True, ge=1, le=100)] = SHOWN
    exact: Annotated[bool, Field(strict=True)] = False


class Settle(LeftOut):
    """What is left out, and the share of the training images that exact TID looks at; none: a
    fiftieth, 24 at least.
    """

    share: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None


def app(
    bench: Bench,
    folder: str | Path,
    *,
    token: str | None = None,
    hosts: Iterable[str] = (),
    waiting: int = WAITING,
    kept: int = KEPT,
) -> FastAPI:
    """The server of a run.

    Args:
        bench: the run; it needs a bank or an index.
        folder: where past queries are kept.
        token: what whoever asks must know; None: nothing, for a server that only this machine can
            reach.
        hosts: names that the server goes by beside localhost and its addresses.
        waiting: questions that may wait for the one that is being answered; one more gets 429.
        kept: past queries that are kept, the newest.
    """
    asking, worker, door = Asking(bench, Path(folder), kept), Worker(waiting), Door(token, hosts)
    static = _static()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    result = FastAPI(
        title="wherefrom",
        description="Which training images made this generated image?",
        lifespan=lifespan,
        docs_url=None,  # these would load scripts from elsewhere
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    result.add_middleware(Guard, door=door, images=("/api/search", upload.BYTES))

    @result.exception_handler(WherefromError)
    async def refused(_: Request, error: WherefromError) -> JSONResponse:
        status = status_of(error)
        headers = {"retry-after": "2"} if status == 429 else None
        return JSONResponse({"detail": str(error)}, status, headers)

    @result.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
        # not what was sent: it may hold what JSON cannot
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return JSONResponse({"detail": f"{where[:100]!a}: {first['msg']}"}, 422)

    @result.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @result.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        logging.getLogger("wherefrom.serve").error("a request failed", exc_info=error)
        return JSONResponse({"detail": "this failed inside: see the server's log"}, 500)

    # --- the page -------------------------------------------------------------------------------

    @result.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file(static, "index.html")

    @result.get("/static/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return _file(static, name)

    @result.get("/health", tags=["server"])
    async def health() -> dict[str, Any]:
        """Whether the server is up, and how much it has to do."""
        return {"status": "ok", "unfinished": worker.unfinished, "waiting_at_most": worker.most}

    @result.post("/api/enter", tags=["server"], status_code=204)
    async def enter(asked: Enter) -> Response:
        """Exchange the token for a cookie."""
        if not door.opens(asked.token):
            return JSONResponse({"detail": "this is not the server's token"}, 401)
        response = Response(status_code=204)
        if door.closed:
            response.set_cookie(door.cookie, door.proof, httponly=True, samesite="strict")
        return response

    @result.get("/api/about", tags=["server"])
    def about() -> dict[str, Any]:
        """The run: its name, its training images, what can be asked, and the limits."""
        limits = {
            "waiting": worker.most,
            "upload_bytes": upload.BYTES,
            "upload_pixels": upload.PIXELS,
            "queries_kept": kept,
        }
        return {**asking.about, "limits": limits, "notes": asking.gallery.notes}

    # --- questions that take the network --------------------------------------------------------

    @result.post("/api/generate", tags=["questions"], status_code=202)
    async def generate(asked: Generate) -> dict[str, str]:
        """Generate an image; its events say how far it is, and end with its sources. A model that
        takes a class or a caption and was told none answers 428.
        """
        asking.conditions.check_generation(asked.cond)
        return _begun(worker.submit(lambda job: asking.generate(asked.seed, asked.cond, job)))

    @result.post("/api/search", tags=["questions"], openapi_extra=_IMAGE)
    async def search(
        request: Request,
        cond: Annotated[str | None, Query(max_length=LONGEST)] = None,
        name: Annotated[str, Query(max_length=1000)] = "",
    ) -> Any:
        """The sources of an image, whose bytes are the body: PNG, JPEG, WebP, GIF or BMP. What it
        was generated from is what its file says, else `cond`; where neither does, it gets 428.
        """
        content, title = await request.body(), _title(name)
        return await _done(worker.submit(lambda job: asking.search(content, title, cond, job)))

    @result.post("/api/queries/{query}/settle", tags=["questions"], status_code=202)
    async def settle(query: str, asked: Settle) -> dict[str, str]:
        """Let exact TID look at the best of a query; its events say how far it is."""
        known, without = asking.gallery.query(query).id, asked.without
        return _begun(worker.submit(lambda job: asking.settle(known, asked.share, without, job)))

    @result.get("/api/items/{item}/nearest", tags=["questions"])
    async def nearest(item: int) -> Any:
        """The sources of a training image itself, other than it."""
        asking.items.place(item)
        return await _done(worker.submit(lambda job: asking.nearest(item, job)))

    @result.get("/api/jobs/{job}/events", tags=["questions"], response_class=StreamingResponse)
    async def events(job: str, request: Request) -> StreamingResponse:
        """What a question has to tell so far and from now on, as server-sent events."""
        last = request.headers.get("last-event-id", "")
        first = int(last) + 1 if last.isascii() and last.isdecimal() and len(last) < 10 else 0
        heard = worker.heard(job, first)
        return StreamingResponse(_stream(heard), media_type="text/event-stream")

    @result.delete("/api/jobs/{job}", tags=["questions"], status_code=204)
    async def stop(job: str) -> None:
        """Stop a question where it next says how far it is."""
        worker.job(job).stopped = True

    # --- what was found -------------------------------------------------------------------------

    @result.get("/api/queries", tags=["past queries"])
    def queries() -> list[dict[str, Any]]:
        """All past queries, the newest first."""
        return [asking.summary(query) for query in asking.gallery.listed()]

    @result.get("/api/queries/{query}", tags=["past queries"])
    def one(query: str) -> dict[str, Any]:
        """A past query, its steps and its sources."""
        return asking.shown(asking.gallery.query(query))

    @result.delete("/api/queries/{query}", tags=["past queries"], status_code=204)
    def forget(query: str) -> None:
        """Take a query out of the gallery, and its file off the disk."""
        asking.gallery.forget(query)

    @result.post("/api/queries/{query}/ranking", tags=["past queries"])
    def ranking(query: str, asked: Annotated[Ranking, Body()]) -> dict[str, Any]:
        """The sources of a query without some training images or groups of them."""
        return asking.ranking(query, asked.without, asked.top_k, asked.exact)

    @result.get("/api/queries/{query}/image", tags=["past queries"])
    def picture(query: str, step: int | None = None) -> Response:
        """A query's picture as the network sees it; with a step, what it was then."""
        return _image(*asking.picture(query, step))

    @result.get("/api/queries/{query}/report", tags=["past queries"])
    async def report(
        query: str,
        exact: bool = False,
        left_out: Annotated[str, Query(max_length=_LINK)] = "{}",
    ) -> Response:
        """The report on a query, to be kept or sent on; `left_out`: as a ranking is told it, as
        JSON.
        """
        known, without = asking.gallery.query(query).id, _left_out(left_out)
        content = await _done(worker.submit(lambda _: asking.report(known, exact, without)))
        headers = {"content-disposition": _attached(asking.file_name(known, exact, without))}
        return Response(content, 200, headers, "text/html")

    @result.get("/api/items/{item}", tags=["training images"])
    def item(item: int) -> dict[str, Any]:
        """A training image: its words, its groups, and its rank for every query so far."""
        return asking.item(item)

    @result.get("/api/items/{item}/image", tags=["training images"])
    def item_image(item: int) -> Response:
        """A training image as the network sees it."""
        return _image(*asking.items.picture(item))

    return result


def _left_out(given: str) -> Without:
    """What a link leaves out."""
    try:
        return LeftOut.model_validate_json(given).without
    except ValidationError as error:
        wrong = [{**one, "loc": ("query", "left_out", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(wrong) from None


def _attached(name: str) -> str:
    """The header of a file to be saved; letters that not all of the way understands come twice."""
    plain = name.encode("ascii", "ignore").decode()
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, errors='replace')}"


def _static() -> dict[str, bytes]:
    """The page's own files by name: no name that is asked for reaches the disk."""
    folder = files(__package__).joinpath("static")
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def _file(static: dict[str, bytes], name: str) -> Response:
    if name not in static:
        return JSONResponse({"detail": "there is no such file"}, 404)
    kind = _TYPES.get(Path(name).suffix, "application/octet-stream")
    return Response(static[name], 200, {"cache-control": "no-cache"}, kind)


def _image(content: bytes, media: str) -> Response:
    # the address has the collection in it: another run's images are not taken for this one's
    return Response(content, 200, {"cache-control": "private, max-age=86400"}, media)


def _title(name: str) -> str:
    """A file's name as one line of words."""
    words = "".join(letter if letter.isprintable() else " " for letter in name)
    return " ".join(words.split())[:120] or "an image"


def _begun(job: Job) -> dict[str, str]:
    return {"job": job.id, "events": f"/api/jobs/{job.id}/events"}


async def _done(job: Job) -> Any:
    return await asyncio.wrap_future(job.result)


async def _stream(heard: AsyncIterator[tuple[int, Event] | None]) -> AsyncIterator[str]:
    async for one in heard:
        if one is None:
            yield ": still here\n\n"
        else:
            yield f"id: {one[0]}\ndata: {json.dumps(one[1])}\n\n"
