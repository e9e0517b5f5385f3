"""Decoder layers split around their attention: any Hugging Face decoder, by its own code (``traced.py``)."""
