"""Decoder layers split around their attention: any Hugging Face decoder, by its own code.

* ``patching``: installs the halves on a model, and takes them off again; ``patched_model`` is what the engine calls.
* ``tracing/``: looks at a model in a few runs, and makes the parts of its forward.
* ``weights/``: how the weights of linears are held, and which of them a rank keeps.
* ``model_classes``: what a program imports of transformers before it loads a model.
* ``compiled``, ``bound_half``, ``compile_cache``: compile these parts, call the graphs, and keep them for later starts.
"""
