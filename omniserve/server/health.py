"""Health: whether the server's process is up, and whether its engine takes requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from omniserve.server.answer_models import Status
from omniserve.server.openapi import answers
from omniserve.server.service import Service


def router(service: Service) -> APIRouter:
    """Return the routes; the port opens when the engine is ready for the first time."""
    routes = APIRouter()

    @routes.get("/health/live", responses=answers(Status))
    async def live() -> Response:
        """Answer 200 as long as the process can answer: while the engine is started again, too."""
        return JSONResponse({"status": "ok"})

    @routes.get("/health", responses=answers(Status, 503))
    @routes.get("/health/ready", responses=answers(Status, 503))
    async def ready() -> Response:
        """Answer 200 while new calls are taken, else 503 with the reason."""
        service.check_open()
        return JSONResponse({"status": "ok"})

    return routes
