"""The page /dashboard: the last minutes of a server, its batches, and a box to send a prompt.

``series`` takes the values of /metrics and makes of them what the charts show, ``history`` keeps that for some minutes,
``serving`` has the routes and is all of it as a part of a server; ``static/`` is for browsers (``vendor/``: uPlot, as
released).
"""
