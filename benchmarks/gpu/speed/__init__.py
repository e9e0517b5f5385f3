"""How fast is it, beside what the hardware allows? Each module is a script of its own."""
