"""Which of several engines a request goes to: policies in a registry, used by the server and by the simulator.

Free of torch, of clocks and of sockets: engines are seen through the books that the front keeps of each
(``books.py``), which hold the engine's own forecast and what was sent to it since.
"""
