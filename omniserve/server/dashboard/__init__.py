"""The page /dashboard: the last minutes of a server, its batches, and a box to send a prompt.

``readings`` takes the values of /metrics, ``series`` makes of them what the charts show, ``history`` keeps that for
some minutes, ``pages`` are the routes, ``serving`` is all of it as a part of a server; ``static/`` is for browsers.
"""
