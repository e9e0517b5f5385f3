"""The engines of a server: each is a process of its own, which is watched, started again, and chosen for calls.

``fleet`` chooses among engines that come from ``sources``; ``supervisor`` starts each again, and ``client`` talks to
its process (``process``), one of this machine (``local``) or of another (``remote``; ``agent`` runs there, by hand or
by Ray: ``on_ray``). ``admin`` is ``/admin/engines``.
"""
