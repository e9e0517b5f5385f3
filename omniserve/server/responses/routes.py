"""The paths under /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from omniserve.server.generate import generate
from omniserve.server.openapi import GENERATION_ERRORS, ResponseObject, answers, takes
from omniserve.server.responses.fields import CreateResponse
from omniserve.server.responses.shape import ResponseShape
from omniserve.server.service import Service


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post(
        "/v1/responses",
        openapi_extra=takes(CreateResponse),
        responses=answers(ResponseObject, *GENERATION_ERRORS, streams=True),
    )
    async def create(request: Request) -> Response:
        return await generate(service, request, ResponseShape)

    return routes
