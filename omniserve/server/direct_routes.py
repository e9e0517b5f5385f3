"""Calls endpoints whose only parameter is the request, without the framework's router and its layers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """ASGI middleware in front of an application: its endpoints whose only parameter is the request, called at once.

    The framework's router finds the same endpoints and calls them alike, after looking for parameters, and with layers
    around each message that is sent, which cost as much as a generation does itself. Errors are answered by the
    application's handlers. Paths with parameters, wrong methods and unknown paths are left to the application.

    Args:
        app: The application.
        routes: Those of its routers.
    """

    def __init__(self, app: FastAPI, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._handlers = app.exception_handlers
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        for route in routes:
            if isinstance(route, APIRoute) and "{" not in route.path and _takes_request_alone(route.endpoint):
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request({**scope, "app": self._app}, receive, send)  # with which a wrong form is an HTTPException
        try:
            response = await endpoint(request)
        except Exception as error:
            kind = next(kind for kind in type(error).__mro__ if kind in self._handlers)
            handler = cast("Callable[[Request, Exception], Awaitable[Response]]", self._handlers[kind])
            response = await handler(request, error)
            await response(scope, receive, send)
            if kind is Exception:
                raise  # a bug: its traceback belongs to the log
            return
        await response(scope, receive, send)


def _takes_request_alone(endpoint: Callable[..., object]) -> bool:
    if not inspect.iscoroutinefunction(endpoint):
        return False
    parameters = inspect.signature(endpoint, eval_str=True).parameters.values()
    return [parameter.annotation for parameter in parameters] == [Request]
